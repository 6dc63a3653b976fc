"""One worker process from its launcher's question to its end: what it said last, when, and what that means by now."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from flashrec.agent.process import WatchedProcess, state_of
from flashrec.core.types import Assignment
from flashrec.transport import page
from flashrec.transport.paths import page_path, stacks_path
from flashrec.transport.stream import Channel
from flashrec.wire import messages as m

SILENT_S = 1.0  # no heartbeat for so long: ask the kernel, and read the page, where it is
Worker = Channel[m.ToAgentFromWorker]


class Life:
    """socket: the agent's, beside which the worker has its files. Times are seconds of the agent's monotonic clock."""

    def __init__(self, launch: int, assignment: Assignment, process: WatchedProcess, socket: Path, now: float) -> None:
        self.launch, self.assignment, self.process = launch, assignment, process
        self.channel: Worker | None = None
        self.spoken_out = asyncio.Event()
        self.gone = asyncio.Event()
        self.is_hastened = False  # killed because its script had ended with an exception
        self.joined = False
        self.heard_at = self.changed_at = now
        self.farewell = "none"
        self.status: int | None = None
        self.status_told = asyncio.Event()
        self.kill_reason = ""
        self.is_doomed = False  # its stacks are being taken, then it is killed
        self.stacks_signal = self._runtime_pid = 0
        self.page_path = page_path(socket, assignment.rank, assignment.incarnation)
        self.stacks_path = stacks_path(socket, assignment.rank, assignment.incarnation)
        self._tag = m.WorkerBeat(assignment.rank, assignment.incarnation, -1, -1, -1, "init")

    @property
    def who(self) -> tuple[int, int]:
        """Rank and incarnation."""
        return self.assignment.rank, self.assignment.incarnation

    @property
    def pid(self) -> int:
        """The process that runs the script: the one that said hello (`bash train.sh` starts another one)."""
        return self._runtime_pid if self._runtime_pid > 1 else self.process.pid

    def join(self, channel: Worker, stacks_signal: int, now: float) -> None:
        """Its runtime has said hello."""
        self.channel, self.joined, self.heard_at, self.stacks_signal = channel, True, now, stacks_signal
        self._runtime_pid = channel.peer_pid

    def hear(self, beat: m.WorkerBeat, now: float) -> None:
        """A heartbeat has come."""
        if _told(beat) != _told(self._tag):
            self.changed_at = now
        self._tag, self.heard_at = beat, now

    def forgive(self, late_s: float, now: float) -> None:
        """We were not listening for so long."""
        self.heard_at, self.changed_at = min(now, self.heard_at + late_s), min(now, self.changed_at + late_s)

    def silent_s(self, now: float) -> float:
        return max(0.0, now - self.heard_at)

    def tag(self, now: float) -> m.WorkerBeat:
        """The newest tag and how old it is. Of a silent worker also where it is by now, if that can be read."""
        silent_s = self.silent_s(now)
        still_s = max(0.0, now - self.changed_at)
        if silent_s < SILENT_S or not self.joined:
            return msgspec.structs.replace(self._tag, still_s=still_s, silent_s=silent_s)
        where, quiet = page.read(self.page_path) or (self._tag.where, self._tag.quiet)
        return msgspec.structs.replace(
            self._tag, where=where, quiet=quiet, still_s=still_s, silent_s=silent_s, process=state_of(self.pid)
        )

    def is_stopped(self) -> bool:
        """The kernel shows the process as stopped: SIGSTOP, a debugger, `scontrol suspend`."""
        return self.process.is_stopped() or state_of(self.pid) in ("T", "t")

    def remove_files(self) -> None:
        for path in (self.page_path, self.stacks_path):
            path.unlink(missing_ok=True)


def _told(beat: m.WorkerBeat) -> tuple[object, ...]:
    """What counts as a change: everything but whether it waits."""
    return beat.v, beat.voted, beat.passed, beat.where, beat.quiet, beat.collectives
