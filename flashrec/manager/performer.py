"""Carries out what the machine asks for: one case for each effect of `core.effects`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from flashrec.core import effects as fx
from flashrec.core.machine import Machine
from flashrec.core.types import Phase
from flashrec.manager.agents import AgentKeeper
from flashrec.manager.companions import Companions
from flashrec.manager.control import ControlPlane
from flashrec.manager.departures import Departures
from flashrec.manager.health import HealthDesk
from flashrec.manager.launches import Launches
from flashrec.manager.output import OutputFollower
from flashrec.manager.parking import Parking
from flashrec.manager.rendezvous import Rendezvous
from flashrec.wire import messages as m


class Job(Protocol):
    """The manager, as far as effects go."""

    nodes: tuple[str, ...]
    machine: Machine
    control: ControlPlane
    rendezvous: Rendezvous
    output: OutputFollower
    health: HealthDesk

    def abandon(self, node: str) -> None: ...

    def say(self, text: str) -> None: ...


class Performer:
    """companions: None without a pool. end: the job is over."""

    def __init__(
        self, job: Job, launches: Launches, parking: Parking, agents: AgentKeeper, departures: Departures,
        companions: Companions | None, end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._job, self._launches, self._agents, self._departures = job, launches, agents, departures
        self._parking = parking
        self._companions, self._end = companions, end

    def perform(self, effect: fx.AnyEffect) -> None:
        """Do it, or begin it: nothing here waits."""
        job = self._job
        match effect:
            case fx.ChangePhase():
                if effect.after is not Phase.STOPPED:
                    job.say(f"{effect.before} -> {effect.after} (generation {effect.generation}): {effect.reason}")
            case fx.AnnounceFence():
                if not effect.at_boundary:  # else the older generation trains on, and may need a key until the plan
                    job.rendezvous.begin(effect.generation)
                job.control.broadcast(m.Fence(effect.generation, effect.reason, effect.at_boundary))
            case fx.KillWorkers():
                job.control.send(effect.node, m.KillWorkers(effect.workers, effect.reason))
            case fx.LaunchWorkers():
                job.rendezvous.begin(job.machine.generation)
                for tasks in effect.placement.values():
                    for task in tasks:
                        job.output.watch(task.rank, task.incarnation)
                self._launches.begin(self._parking.give(effect.placement))
            case fx.RequestNode():
                assert self._companions is not None
                self._companions.request(effect)
            case fx.ReleaseNode():
                self._give_back(effect)
            case fx.RetireNode():
                self._departures.retire(effect)
            case fx.Tell():
                job.say(effect.text)
            case fx.TakeRung():
                job.say(f"{effect.rung}: {effect.reason}")
            case fx.PublishPlan():  # a rank knows itself whether it rolls forward, and all may
                job.rendezvous.begin(effect.plan.generation)
                job.control.broadcast(m.PlanPublished(msgspec.structs.replace(effect.plan, roll_forward=())))
            case fx.AnnounceResume():
                job.control.broadcast(m.Resume(effect.generation))
            case fx.AnnounceComplete():
                job.control.broadcast(m.Complete(effect.generation))
            case fx.StopJob():
                self._end()

    def _give_back(self, effect: fx.ReleaseNode) -> None:
        assert self._companions is not None
        if effect.node:
            self._job.say(f"node {effect.node} goes back to the pool: {effect.reason}")
            self._agents.exclude(effect.node)
            self._departures.forget(effect.node)
            self._job.abandon(effect.node)
            self._job.control.exclude(effect.node, effect.reason)
            self._job.health.forget(effect.node)
            self._job.nodes = tuple(node for node in self._job.nodes if node != effect.node)
        self._companions.release(effect)
