"""Worker launches under way: tell the agents whom to expect, start the step, and say so if somebody does not start.

A step that could not be created because Slurm's controller is away is tried again until it works or nobody wants it
any more: an outage of the controller is not a failure of the node. One that has just come back refuses steps for some
seconds; such a refusal is tried again, but not for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from flashrec.core.events import LaunchFailed
from flashrec.core.membership import Slot
from flashrec.core.types import Assignment
from flashrec.manager.steps import Launcher, Step, StepEnd, abandon_steps, end_steps
from flashrec.slurm.command import is_outage, is_settling
from flashrec.wire import messages as m

OUTAGE_RETRY_S = 1.0
MAX_SETTLING_TRIES = 30
Placement = Mapping[str, tuple[Assignment, ...]]


class Launches:
    """send(node, message) reaches an agent; slot_of(rank, incarnation) is the machine's slot of that worker, None once
    the machine has given up on it; emit takes a LaunchFailed; note writes into the journal."""

    def __init__(
        self,
        launcher: Launcher,
        send: Callable[[str, m.Message], None],
        slot_of: Callable[[int, int], Slot | None],
        emit: Callable[[LaunchFailed], None],
        note: Callable[..., None],
    ) -> None:
        self._launcher, self._send, self._slot_of = launcher, send, slot_of
        self._emit, self._note = emit, note
        self._count = 0
        self._stopped = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.steps: list[Step] = []
        self.worst_code = 0  # of the steps that have ended by themselves

    def begin(self, placement: Placement) -> None:
        """Start what the machine asked for: one step for the nodes of one Slurm job with the same number of tasks."""
        parts: dict[tuple[int, int], dict[str, tuple[Assignment, ...]]] = {}
        for node, tasks in placement.items():
            parts.setdefault((self._launcher.job_of(node), len(tasks)), {})[node] = tasks
        for part in parts.values():
            self._count += 1
            for node, tasks in part.items():
                self._send(node, m.ExpectTasks(self._count, tasks))
            task = asyncio.create_task(self._see_through(self._count, part))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _see_through(self, launch: int, placement: Placement) -> None:
        everybody = [(a.rank, a.incarnation) for tasks in placement.values() for a in tasks]
        settling_tries = 0
        while True:
            step = self._launcher.workers(launch, placement)
            self.steps.append(step)
            end = await self._run(step, everybody)
            self.steps.remove(step)
            missing = [who for who in everybody if self._is_missing(who)]
            if not missing:
                self.worst_code = max(self.worst_code, 0 if step.is_forced else end.code)
                return
            if self._stopped:
                return
            settling_tries += is_settling(end.said)
            may_pass = is_outage(end.said) or (is_settling(end.said) and settling_tries <= MAX_SETTLING_TRIES)
            if len(missing) < len(everybody) or not may_pass:
                break
            self._note("launch waits for Slurm's controller", launch=launch, said=end.said[-300:])
            await asyncio.sleep(OUTAGE_RETRY_S)
            if self._stopped or all(self._slot_of(*who) is None for who in everybody):
                return
        reason = f"{step.name} ended with code {end.code}: {_last_line(end.said)}"
        for node, tasks in placement.items():
            lost = tuple(who for who in ((a.rank, a.incarnation) for a in tasks) if who in missing)
            if lost:
                self._emit(LaunchFailed(node, lost, reason))

    async def _run(self, step: Step, everybody: list[tuple[int, int]]) -> StepEnd:
        try:
            await step.start()
        except OSError as err:
            return StepEnd(127, f"cannot start {step.name}: {err}")
        ended = asyncio.create_task(step.wait())
        while not ended.done():
            await asyncio.wait([ended], timeout=1.0)
            if not ended.done() and all(self._slot_of(*who) is None for who in everybody):
                step.terminate(hard=True)  # superseded: nobody of this launch is wanted any more
        return ended.result()

    def _is_missing(self, who: tuple[int, int]) -> bool:
        slot = self._slot_of(*who)
        return slot is not None and slot.state == "launched"

    def abandon(self, node: str) -> None:
        """A node is lost: the steps that include it go on without their srun (see `Step.abandon`)."""
        abandon_steps(self.steps, node)

    async def stop(self, timeout_s: float) -> None:
        """End all steps; their workers are dead by now, but srun waits for ever for a task on a lost node."""
        self._stopped = True
        await end_steps(self.steps, self.tasks, timeout_s)


def _last_line(said: str) -> str:
    return said.splitlines()[-1] if said else "it printed nothing"
