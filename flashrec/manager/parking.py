"""Parked tasks of the job: what is to be parked where, what is ready, and who gets a rank.

While training goes on each node with ranks has one parked task, each spare as many as a node has ranks. They are
started like workers (the same kind of job step, `agent.park`), never while a recovery is under way. When ranks are
launched on a node its parked tasks get them; who is left over, or was given to one that turns out to be gone, starts
the ordinary way. Nothing here can fail a launch or a job: a node where parking fails twice in a row is left alone, and
that is said.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from flashrec.config.schema import Hot
from flashrec.core.machine import Machine
from flashrec.core.types import Assignment, Phase
from flashrec.manager.control import ControlPlane, Link
from flashrec.manager.python_command import num_python_words
from flashrec.manager.steps import Launcher, Parked, Step, StepEnd, abandon_steps, end_steps
from flashrec.slurm.command import is_outage, is_settling
from flashrec.wire import messages as m

TICK_S = 0.25
MAX_FAILURES = 2
RETRY_S = 5.0
START_TIMEOUT_S = 300.0  # a task that has not come by then is not awaited any more


class Job(Protocol):
    """The manager, as far as parking goes."""

    machine: Machine
    control: ControlPlane

    def say(self, text: str) -> None: ...


class _Task(msgspec.Struct):
    """One parked task. incarnation: of the agent that it belongs to. cuda: with a context. given: the rank it was
    given, not yet taken."""

    node: str
    incarnation: int
    launch: int
    local_id: int
    asked_at: float
    cuda: bool = False
    is_ready: bool = False
    given: Assignment | None = None


class Parking:
    """launch_cold(placement): start these the ordinary way. note: into the journal."""

    def __init__(
        self, job: Job, settings: Hot, command: tuple[str, ...], launcher: Launcher,
        launch_cold: Callable[[Mapping[str, tuple[Assignment, ...]]], None], note: Callable[..., None],
    ) -> None:  # fmt: skip
        self._job, self._settings, self._launcher = job, settings, launcher
        self._launch_cold, self._note = launch_cold, note
        self._num_flags = num_python_words(command)
        self._tasks: dict[tuple[int, int, str], _Task] = {}
        self._failures: dict[str, tuple[int, set[int]]] = {}  # node -> life of its agent, launches that failed in a row
        self._how, self._cuda = settings.park, settings.cuda
        self._count = 0
        self._running_since: float | None = None
        self._not_before = 0.0
        self.steps: dict[Step, asyncio.Task[StepEnd]] = {}
        if self._how != "none" and self._num_flags is None:
            self._stop("the command is not `python [flags] script.py …` or `python [flags] -m module …`")
        for kind, hear in (
            (m.ParkedReady, self._hear_ready), (m.ParkedEnded, self._hear_ended),
            (m.WorkerUnlikeParked, self._hear_unlike),
        ):  # fmt: skip
            job.control.on(kind, hear)

    # ---- what is to be parked -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Park what is missing, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick(time.monotonic())

    async def tick(self, now: float) -> None:
        """One look at what is missing."""
        machine = self._job.machine
        if machine.phase is not Phase.RUNNING:
            self._running_since = None
            return
        self._running_since = self._running_since or now
        self._forget_lost(now)
        if self._how == "none" or machine.members.is_complete or now < self._not_before:
            return
        if now - self._running_since < self._settings.after_s:
            return
        parts: dict[tuple[int, int, bool], list[str]] = {}
        for node, (count, is_spare) in self._missing().items():
            cuda = self._cuda and is_spare  # elsewhere the GPU is in use
            parts.setdefault((self._launcher.job_of(node), count, cuda), []).append(node)
        for (_, count, cuda), nodes in parts.items():
            await self._park(nodes, count, cuda, now)

    def _missing(self) -> dict[str, tuple[int, bool]]:
        """Node -> how many to park, and whether it has no ranks."""
        members = self._job.machine.members
        there: dict[str, int] = {}
        for task in self._tasks.values():
            there[task.node] = there.get(task.node, 0) + 1
        wanted = {}
        for room in members.rooms(self._job.machine.limits.max_in_place):
            link = self._job.control.links.get(room.name)
            if link is None or not room.trusted or self._has_failed(room.name, link.incarnation):
                continue
            in_use = len(room.free_local_ranks) < members.ranks_per_node
            count = (1 if in_use else members.ranks_per_node) - there.get(room.name, 0)
            if count > 0:
                wanted[room.name] = count, not in_use
        return wanted

    def _has_failed(self, node: str, incarnation: int) -> bool:
        life, failed = self._failures.get(node, (0, set()))
        return life == incarnation and len(failed) >= MAX_FAILURES

    async def _park(self, nodes: list[str], count: int, cuda: bool, now: float) -> None:
        nodes = [node for node in nodes if node in self._job.control.links]  # the step before took a moment to start
        if not nodes or self._job.machine.phase is not Phase.RUNNING:
            return
        self._count += 1
        assert self._num_flags is not None
        how = Parked(self._num_flags, self._how, self._settings, cuda)
        step = self._launcher.parked(self._count, nodes, count, how)
        self._note("parking", nodes=nodes, tasks_per_node=count, launch=self._count, how=self._how, cuda=cuda)
        for node in nodes:
            for local_id in range(count):
                life = self._job.control.links[node].incarnation
                self._tasks[self._count, local_id, node] = _Task(node, life, self._count, local_id, now, cuda)
        launch = self._count
        try:
            await step.start()
        except OSError as err:
            self._step_ended(launch, str(err))
            return
        self.steps[step] = ended = asyncio.create_task(step.wait())

        def over(task: asyncio.Task[StepEnd]) -> None:
            self.steps.pop(step, None)
            if not task.cancelled():
                self._step_ended(launch, task.result().said)

        ended.add_done_callback(over)

    # ---- who gets a rank ----------------------------------------------------------------------------------------

    def give(self, placement: Mapping[str, tuple[Assignment, ...]]) -> dict[str, tuple[Assignment, ...]]:
        """Give ranks to parked tasks, in the order of their local ids. Returns what is left to be launched."""
        left: dict[str, tuple[Assignment, ...]] = {}
        for node, assignments in placement.items():
            link = self._job.control.links.get(node)
            ready = [task for task in self._tasks.values() if task.node == node and task.is_ready and not task.given]
            ready = [task for task in ready if link is not None and task.incarnation == link.incarnation]
            ready.sort(key=lambda task: (task.local_id, task.launch))
            for task, assignment in zip(ready, assignments, strict=False):
                task.given = assignment
                self._job.control.send(node, m.UseParked(task.launch, task.local_id, assignment))
                self._note("parked task used", node=node, rank=assignment.rank, incarnation=assignment.incarnation,
                           launch=task.launch)  # fmt: skip
            if len(ready) < len(assignments):
                left[node] = assignments[len(ready) :]
        return left

    def started(self, rank: int, incarnation: int) -> None:
        """This life of a rank has started; if in a parked task, that is used up."""
        for key, task in list(self._tasks.items()):
            if task.given is not None and (task.given.rank, task.given.incarnation) == (rank, incarnation):
                del self._tasks[key]

    # ---- what is said of them -----------------------------------------------------------------------------------

    def _hear_ready(self, link: Link, said: m.ParkedReady) -> None:
        task = self._tasks.get((said.launch, said.local_id, link.node))
        if task is None or task.incarnation != link.incarnation:
            self._job.control.send(link.node, m.ParkingOver("it came too late", said.launch))
        else:
            task.is_ready = True
            self._failures.pop(link.node, None)
            self._note(
                "parked", node=link.node, launch=said.launch, local_id=said.local_id, took_s=round(said.took_s, 3)
            )

    def _hear_ended(self, link: Link, said: m.ParkedEnded) -> None:
        task = self._tasks.pop((said.launch, said.local_id, link.node), None)
        if task is not None:
            self._lost(task, said.reason, ran=said.ran)

    def _hear_unlike(self, link: Link, said: m.WorkerUnlikeParked) -> None:
        reason = f"rank {said.rank}: {said.reason}"
        if said.only_cuda:
            self._stop_cuda(reason)
        elif self._how != "none":
            self._stop(reason)

    def _step_ended(self, launch: int, said: str) -> None:
        """Tasks of that job step that nobody has heard of will not come."""
        counts = not (is_outage(said) or is_settling(said))  # else Slurm's controller is away, not the node
        for key, task in list(self._tasks.items()):
            if task.launch == launch and not task.is_ready:
                del self._tasks[key]
                self._lost(task, said.splitlines()[-1] if said else "its job step has ended", counts=counts)

    def _lost(self, task: _Task, reason: str, *, ran: bool = False, counts: bool = True) -> None:
        """It is gone; a rank that it was given is launched the ordinary way, unless somebody else has decided."""
        if self._job.machine.phase is Phase.STOPPED:
            return
        self._note("parked task lost", node=task.node, launch=task.launch, local_id=task.local_id, reason=reason)
        if task.given is not None:
            life = self._job.machine.members.life(task.given.rank, task.given.incarnation)
            if life is not None and life.state == "launched":
                self._launch_cold({task.node: (task.given,)})
        elif not task.is_ready:
            self._not_before = time.monotonic() + RETRY_S
            if counts:
                self._failed(task, reason, ran)

    def _failed(self, task: _Task, reason: str, ran: bool) -> None:
        life, failed = self._failures.get(task.node, (0, set()))
        was_enough = self._has_failed(task.node, task.incarnation)
        self._failures[task.node] = task.incarnation, {*(failed if life == task.incarnation else ()), task.launch}
        if self._how == "script" and ran:
            self._how = "imports"
            self._failures.clear()
            self._job.say(f"the script cannot be parked before it has a rank; only imports are, from now on: {reason}")
        elif self._has_failed(task.node, task.incarnation) and not was_enough:
            self._job.say(f"nothing is parked on node {task.node}, workers start the ordinary way there: {reason}")

    def _forget_lost(self, now: float) -> None:
        """Tasks of a former life of an agent are gone with it; so are those that have not come in time."""
        for key, task in list(self._tasks.items()):
            link = self._job.control.links.get(task.node)
            if link is None or link.incarnation != task.incarnation:
                del self._tasks[key]
            elif not task.is_ready and now - task.asked_at > START_TIMEOUT_S:
                del self._tasks[key]
                self._lost(task, f"not ready within {START_TIMEOUT_S:g} s")

    def _stop(self, reason: str) -> None:
        """Park nothing any more."""
        self._how = "none"
        self._note("parking is off", why=reason)
        self._job.say(f"workers start the ordinary way, nothing is parked: {reason}")
        self._job.control.broadcast(m.ParkingOver(reason))
        self._tasks = {key: task for key, task in self._tasks.items() if task.given is not None}

    def _stop_cuda(self, reason: str) -> None:
        """Make no CUDA context any more; those that have one are ended, and parked anew without."""
        if not self._cuda or self._how == "none":
            return
        self._cuda = False
        self._note("parking without CUDA", why=reason)
        self._job.say(f"parked processes make no CUDA context: {reason}")
        for key, task in list(self._tasks.items()):
            if task.cuda and not task.given:
                self._job.control.send(task.node, m.ParkingOver(reason, task.launch))
                del self._tasks[key]

    # ---- job steps ----------------------------------------------------------------------------------------------

    def abandon(self, node: str) -> None:
        """A node is lost: the steps that include it go on without their srun (see `Step.abandon`)."""
        abandon_steps(self.steps, node)

    async def stop(self, timeout_s: float) -> None:
        """End all steps; their tasks are dead by now, or their agents end them."""
        await end_steps(tuple(self.steps), tuple(self.steps.values()), timeout_s)

    def ready(self) -> dict[str, int] | None:
        """Node -> how many parked tasks could take a rank now; None: none are wanted."""
        if self._how == "none":
            return None
        ready: dict[str, int] = {}
        for task in self._tasks.values():
            if task.is_ready and not task.given:
                ready[task.node] = ready.get(task.node, 0) + 1
        return ready
