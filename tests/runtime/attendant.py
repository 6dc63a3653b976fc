"""Looks after the ranks of a `Cluster` as manager and agents do: whoever has died or stands still is fenced off, ended
and replaced, until everybody has ended, or the decision refuses, or the time is over.

    all run ──► somebody died or stands still ──► (`on_lost` may make it worse) ──► fence ──► survivors report
       ▲                                                                                          │
       └───────────────────────── replacements are started ◄──── whoever stands still is killed ◄─┘

Who stands still is seen from the outside, in /proc. Nothing here knows which fault was planned.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from flashrec.core import events
from flashrec.runtime.control import FENCED_EXIT_CODE
from tests.runtime.support import Cluster

_POLL_S = 0.01
_MAX_LOSSES = 24  # of one job: more is a loop


class Ending(enum.Enum):
    """How a job ended."""

    DONE = "done"
    REFUSED = "refused"  # by the decision: see `Cluster.refusals`
    FAILED = "failed"  # a rank ended in a way that no fault explains: see `Attendant.why`
    HUNG = "hung"


class Attendant:
    """patience_s: how long survivors may take to report before a rank that stands still is killed. gather_s: who is
    lost within this time is lost at once. on_lost: may hit more ranks, and returns those. before_fence: is told who is
    given up, just before the fence."""

    def __init__(
        self,
        cluster: Cluster,
        program: Callable[..., None],
        config: dict[str, Any],
        *,
        patience_s: float = 5.0,
        gather_s: float = 0.0,
        on_lost: Callable[[set[int]], set[int]] = lambda ranks: set(),
        before_fence: Callable[[set[int]], None] = lambda ranks: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster, self._program, self._config = cluster, program, config
        self._patience_s, self._gather_s = patience_s, gather_s
        self._on_lost, self._before_fence, self._on_tick = on_lost, before_fence, on_tick
        self._done: set[int] = set()
        self.num_losses = 0
        self.gave_up: list[int] = []  # ranks that ended themselves because they could not be unblocked
        self.why = ""

    def start(self) -> None:
        self._cluster.start_all(self._program, **self._config)

    def run(self, timeout_s: float) -> Ending:
        """Until the job has ended, in one way or the other. Whatever still runs then is the caller's to end."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._on_tick()
            lost = self._look()
            if self.why:
                return Ending.FAILED
            if self._cluster.refusals:
                return Ending.REFUSED
            if len(self._done) == self._cluster.world_size:
                return Ending.DONE
            if lost:
                self._replace(lost)
            else:
                wait([p.sentinel for r, p in self._cluster.processes.items() if r not in self._done], _POLL_S)
        self._dump_stacks()
        self.why = f"not at its end after {timeout_s:g} s"
        return Ending.HUNG

    def _look(self) -> set[int]:
        """Ranks that are dead or stand still; notes who has ended well."""
        lost = set()
        for rank, process in self._cluster.processes.items():
            if rank in self._done:
                continue
            code = process.exitcode
            if code == 0:
                self._done.add(rank)
            elif code == -signal.SIGKILL:
                lost.add(rank)
            elif code == FENCED_EXIT_CODE:
                lost.add(rank)
                self.gave_up.append(rank)
            elif code is not None:
                self.why = f"rank {rank} ended with {code}"
            elif stands_still(process.pid):
                lost.add(rank)
        return lost

    def _replace(self, lost: set[int]) -> None:
        cluster = self._cluster
        lost = lost | self._on_lost(lost)
        until = time.monotonic() + self._gather_s
        while time.monotonic() < until:
            time.sleep(_POLL_S)
        lost |= self._look()
        self.num_losses += len(lost)
        if self.num_losses > _MAX_LOSSES:
            self.why = f"{self.num_losses} ranks were lost"
        if self.why:
            return
        if not cluster.resumed:
            self._done.clear()
            cluster.start_over(self._program, **self._config)
            return
        self._before_fence(lost)
        cluster.condemn(*lost)
        standing = [rank for rank in lost if cluster.processes[rank].exitcode is None]
        if standing:
            self._await_reports(lost)
        for rank in standing:
            cluster.processes[rank].kill()
            cluster.processes[rank].join(10)
        for rank in sorted(lost):
            cluster.start(self._program, rank, joins=True, **self._config)

    def _await_reports(self, lost: set[int]) -> None:
        """With a peer that neither answers nor goes away, survivors have to be brought out of their collectives."""
        cluster = self._cluster
        until = time.monotonic() + self._patience_s
        while time.monotonic() < until:
            living = {r for r, p in cluster.processes.items() if r not in lost and p.exitcode is None}
            said = {
                rank
                for _, rank, message in list(cluster.messages)
                if isinstance(message, events.WorkerReported) and message.generation == cluster.generation
            }
            if living <= said:
                return
            time.sleep(_POLL_S)

    def _dump_stacks(self) -> None:
        for rank, process in self._cluster.processes.items():
            if rank not in self._done and process.exitcode is None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)


def stands_still(pid: int) -> bool:
    """Stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False
