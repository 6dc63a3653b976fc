"""Hangs and stragglers of one job: what agents tell about their workers in, looks, kills and notes out.

Who hangs is decided in `core.hangs`, who is slow in `core.stragglers`. Before a hung worker is killed its agent is
asked for its stacks, and if it has moved meanwhile it is left alone. It is killed through its agent like any other, so
its end is an ordinary `WorkerExited` with the hang as its reason, and recovery in place follows. A process that does
not die of SIGKILL is in a system call that does not return: then its node is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

import msgspec

from flashrec.config.schema import Hangs
from flashrec.core import events as e
from flashrec.core.hangs import LOOP, SILENT_S, HangDetector, Hung, Stalled
from flashrec.core.machine import Machine
from flashrec.core.stragglers import Straggler, Stragglers
from flashrec.core.types import Phase
from flashrec.manager.control import ControlPlane, Link
from flashrec.manager.excerpt import excerpt
from flashrec.manager.journal import Journal
from flashrec.manager.pace import rest_s
from flashrec.manager.voice import say
from flashrec.wire import messages as m

ANSWER_MARGIN_S = 0.5  # for the way of the question and the answer
DEATH_TIMEOUT_S = 10.0  # SIGKILL -> end of the process


class Job(Protocol):
    """What this needs of the job (the manager is one)."""

    machine: Machine
    control: ControlPlane
    journal: Journal

    def emit(self, event: e.AnyEvent) -> None: ...


class _Asked(msgspec.Struct):
    """A worker was found hung and its stacks are on their way."""

    node: str
    reason: str
    timer: asyncio.TimerHandle


class HangWatch:
    """`heard` takes tags, `run` judges them; `stacks_taken` takes the answers."""

    def __init__(self, job: Job, settings: Hangs, tags_every: int = 1, heartbeat_interval_s: float = 0.25) -> None:
        """tags_every: heartbeats of an agent for one that has tags."""
        self._job, self._settings = job, settings
        self._detector = HangDetector(settings, (tags_every - 1) * heartbeat_interval_s)
        self._stragglers = Stragglers(settings, tags_every)
        self._generation: int | None = None  # the one that trains just now
        self._asked: dict[tuple[int, int], _Asked] = {}
        self._deaths: set[asyncio.TimerHandle] = set()

    async def run(self) -> None:
        """Judge until cancelled."""
        while self._settings.enabled:
            began = time.thread_time()
            self.look(time.monotonic())
            await asyncio.sleep(rest_s(self._settings.tick_interval_s, time.thread_time() - began))

    def heard(self, tags: Iterable[m.WorkerBeat], now: float) -> None:
        """An agent has told about its workers."""
        tags = tuple(tags)
        self._detector.heard(tags, now)
        for tag in tags:
            if tag.quiet:
                self._stragglers.restart(now)
            elif tag.waiting is not None and tag.where in LOOP and tag.silent_s < SILENT_S:
                self._stragglers.seen(tag.rank, tag.incarnation, tag.waiting)

    def look(self, now: float) -> None:
        """Judge everybody, if the job trains."""
        machine = self._job.machine
        if machine.phase is not Phase.RUNNING:
            self._generation = None
            return
        if self._generation != machine.training:
            self._generation = machine.training
            self._detector.resumed(now, machine.members.world_size)
            self._stragglers.restart(now)
        for finding in self._detector.tick(now):
            if isinstance(finding, Hung):
                self._found(finding)
            else:
                self._stalled(finding)
        for slow in self._stragglers.tick(now):
            self._paced(slow)

    def note_of(self, rank: int) -> str:
        """For the status: 'hung', 'quiet: …', 'straggler' or ''."""
        return self._detector.note_of(rank) or ("straggler" if self._stragglers.is_slow(rank) else "")

    def stacks_taken(self, link: Link, taken: m.StacksTaken) -> None:
        """An agent has looked: because we asked, or because it is about to kill a silent or stopped worker."""
        who = (taken.rank, taken.incarnation)
        if who in self._asked:
            self._conclude(who, taken)
            return
        self._job.journal.note(
            "stacks of a silent worker", rank=taken.rank, incarnation=taken.incarnation, node=link.node,
            how=taken.how, stacks=taken.text,
        )  # fmt: skip
        where = excerpt(taken.how, taken.text)
        if where:
            say(f"rank {taken.rank} says nothing: {where} ({taken.how})")

    # ---- what was found -----------------------------------------------------------------------------------------

    def _found(self, hung: Hung) -> None:
        who = (hung.rank, hung.incarnation)
        slot = self._job.machine.members.acting(*who)
        if slot is None or who in self._asked:
            return
        self._job.journal.verdict(f"rank {hung.rank}", "hung", hung.reason, self._job.machine.generation)
        timeout_s = self._settings.stacks_timeout_s
        timer = asyncio.get_running_loop().call_later(timeout_s + ANSWER_MARGIN_S, self._conclude, who, None)
        self._asked[who] = _Asked(slot.node, hung.reason, timer)
        self._job.control.send(slot.node, m.StacksAsked(*who, timeout_s))

    def _conclude(self, who: tuple[int, int], taken: m.StacksTaken | None) -> None:
        """The stacks are there, or do not come: kill it, unless it has moved."""
        asked = self._asked.pop(who)
        asked.timer.cancel()
        how, text = (taken.how, taken.text) if taken is not None else ("none", "its agent did not answer in time")
        is_hung = self._job.machine.members.acting(*who) is not None and self._detector.is_hung(*who)
        self._job.journal.note(
            "worker hangs" if is_hung else "worker moves again", rank=who[0], incarnation=who[1], node=asked.node,
            reason=asked.reason, how=how, stacks=text, killed=is_hung and self._settings.kill,
        )  # fmt: skip
        where = excerpt(how, text)
        reason = asked.reason + (f": {where}" if where else "")
        if not is_hung:
            say(f"rank {who[0]} moves again, after it was found hung: it {reason} ({how})")
        elif not self._settings.kill:
            say(f"rank {who[0]} {reason} ({how}); hangs.kill is off: it is left alone")
        else:
            say(f"rank {who[0]} {reason} ({how}); killed")
            self._job.control.send(asked.node, m.KillWorkers((who,), reason))
            self._expect_death(who, asked.node, reason)

    def _expect_death(self, who: tuple[int, int], node: str, reason: str) -> None:
        def check() -> None:
            self._deaths.discard(timer)
            member = self._job.machine.members.nodes.get(node)
            slot = self._job.machine.members.acting(*who)
            if slot is not None and slot.node == node and member is not None:
                why = f"rank {who[0]} does not end within {DEATH_TIMEOUT_S:g} s of SIGKILL; it {reason}"
                say(f"node {node} is given up: {why}")
                self._job.emit(e.NodeCondemned(node, member.incarnation, why, kind="link"))

        timer = asyncio.get_running_loop().call_later(DEATH_TIMEOUT_S, check)
        self._deaths.add(timer)

    def _stalled(self, stalled: Stalled) -> None:
        self._job.journal.verdict("all ranks", "stalled", stalled.reason, self._job.machine.generation)
        say(stalled.reason + ("; the step is done again" if self._settings.kill else "; hangs.kill is off"))
        if self._settings.kill:
            self._job.emit(e.TrainingStalled(stalled.reason))

    def _paced(self, slow: Straggler) -> None:
        state = "slow" if slow.is_slow else "up to pace"
        self._job.journal.verdict(f"rank {slow.rank}", state, slow.reason, self._job.machine.generation)
        say(f"rank {slow.rank} is {'a straggler' if slow.is_slow else 'no straggler any more'}: {slow.reason}")
