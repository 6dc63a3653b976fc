"""The part in the victim's process that decides whether a fault is due, claims it, records it and does it.

Knows nothing of torch: `places` tells it where the script is. A fault is claimed by creating its record, which only
one process can do, so it cannot happen twice, however often the step is redone or the rank replaced.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass

from flashrec.testing.directory import POLL_INTERVAL_S, Armed, FaultDirectory, FaultTimeout, Fired, wall_now
from flashrec.testing.plan import Fault, FaultPlan

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGSTOP": signal.SIGSTOP}
BLOCKED_S = 0.05


class FaultRaised(RuntimeError):
    """The exception of a fault of kind `raise`."""


def node_name() -> str:
    """Name of this node, as `flashrec run` knows it, else as Slurm does, else the host name."""
    return os.environ.get("FLASHREC_NODE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def stand_still(seconds: float, holds_lock: bool) -> None:
    """Sleep; with `holds_lock` inside a C call that keeps the interpreter's lock, so that no thread can run Python."""
    if holds_lock:
        library = ctypes.PyDLL(None)  # unlike CDLL it does not release the lock
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            library.usleep(int(min(left, 1000.0) * 1e6))
    else:
        time.sleep(seconds)


@dataclass(frozen=True)
class ThreadSample:
    """What the kernel says of one thread: state letter and CPU time used, in clock ticks and in switches."""

    state: str
    used: tuple[int, int, int]


def sample_thread(thread_id: int) -> ThreadSample:
    """Read /proc/self/task/<thread_id>: a thread that sleeps and uses nothing between two samples is blocked."""
    task = f"/proc/self/task/{thread_id}"
    with open(f"{task}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    with open(f"{task}/schedstat") as file:
        on_cpu_ns, _, num_slices = file.read().split()
    return ThreadSample(fields[0], (int(on_cpu_ns), int(num_slices), int(fields[11]) + int(fields[12])))


class Injector:
    """Faults of one rank in one process. `visit(place, step)` is called by the hooks, wherever the script comes by.

    rank None: that of the environment, looked up when it is first needed (a parked process has none at its start)."""

    def __init__(self, plan: FaultPlan, rank: int | None = None):
        self.plan, self._rank = plan, rank
        self.directory = FaultDirectory(plan.directory)
        self._life = None if rank is None else self.directory.begin_life(rank)

    @property
    def rank(self) -> int:
        if self._rank is None:
            self._rank = int(os.environ.get("RANK", "0"))
        return self._rank

    @property
    def life(self) -> int:
        """Number of this process among those of its rank."""
        if self._life is None:
            self._life = self.directory.begin_life(self.rank)
        return self._life

    @property
    def _faults(self) -> list[Fault]:
        return [fault for fault in self.plan.faults if fault.rank == self.rank]

    def due(self, place: str, step: int | None) -> list[Fault]:
        """Faults that are to happen here and have not."""
        return [fault for fault in self._faults if self._is_due(fault, place, step)]

    def _is_due(self, fault: Fault, place: str, step: int | None) -> bool:
        if (fault.place, fault.step) != (place, step) or fault.life not in (None, self.life):
            return False
        if place == "join" and self.life == 0:
            return False
        return not self.directory.has_fired(fault.id)

    def visit(self, place: str, step: int | None) -> None:
        """The script is at `place` of `step`: let happen what is due."""
        for fault in self.due(place, step):
            self.perform(fault)

    def hold(self, step: int) -> None:
        """The script is about to contribute its gradients of `step`: hold them back if somebody must wait for them."""
        for fault in self.plan.faults:
            if fault.holder == self.rank and fault.step == step and not self.directory.has_fired(fault.id):
                text = f"rank {self.rank} holds step {step} back and fault {fault.id!r} did not fire"
                self.directory.wait_until(
                    lambda fault=fault: self.directory.has_fired(fault.id),  # type: ignore[misc]
                    self.plan.timeout_s,
                    text,
                )

    def watch_collective(self, step: int) -> None:
        """Backward of `step` begins: what is due `in-collective` fires once this thread is blocked."""
        for fault in self.due("in-collective", step):
            arguments = (fault, threading.get_native_id())
            threading.Thread(target=self._fire_when_blocked, args=arguments, daemon=True).start()

    def _fire_when_blocked(self, fault: Fault, thread_id: int) -> None:
        """While the holder holds, the only thing that blocks a backward pass is a collective: so wait for that."""
        before, since = sample_thread(thread_id), time.monotonic()
        while time.monotonic() < since + BLOCKED_S:
            time.sleep(POLL_INTERVAL_S)
            now = sample_thread(thread_id)
            if now.state != "S" or now.used != before.used:
                before, since = now, time.monotonic()
        self.perform(fault)

    def perform(self, fault: Fault) -> None:
        """Claim the fault and do it; nothing if another process was faster."""
        if fault.kind == "request":
            self._request(fault)
        elif self._record(fault):
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if fault.kind in SIGNALS:
            signal.raise_signal(SIGNALS[fault.kind])
        elif fault.kind == "exit":
            os._exit(1)
        elif fault.kind in ("hang", "gil"):
            stand_still(self.plan.timeout_s, holds_lock=fault.kind == "gil")
            raise FaultTimeout(
                f"rank {self.rank} stands still at {fault.place} (fault {fault.id!r}) and nobody ended it within "
                f"{self.plan.timeout_s:g} s"
            )
        else:
            raise FaultRaised(f"fault {fault.id!r}: raised at {fault.place} of step {fault.step} on rank {self.rank}")

    def _record(self, fault: Fault) -> bool:
        where = (fault.id, fault.kind, fault.place, self.rank, node_name(), fault.step)
        return self.directory.record_fired(Fired(*where, mono=time.monotonic(), wall=wall_now()))

    def _request(self, fault: Fault) -> None:
        where = (fault.id, fault.kind, fault.place, self.rank, node_name(), os.getpid(), fault.step)
        if not self.directory.record_armed(Armed(*where, mono=time.monotonic(), wall=wall_now())):
            return
        text = f"rank {self.rank} stands at {fault.place} and nobody performed fault {fault.id!r}"
        self.directory.wait_until(lambda: self.directory.has_fired(fault.id), self.plan.timeout_s, text)
