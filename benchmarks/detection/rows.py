"""The faults that are measured, one row each: how it is done, how it is seen to have been done, what undoes it, and
which line of the journal is the verdict.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.detection import reading
from benchmarks.detection.job import ROOT, BenchJob, JobTrouble
from benchmarks.detection.memory import MemoryGroup, NoMemoryGroup
from benchmarks.detection.orders import last_stamp
from flashrec.testing import Fault

PROCESS_AIM_S, NODE_AIM_S, HANG_AIM_S = 0.2, 2.0, 3.0
FIRE_TIMEOUT_S = 60.0
OOM_LIMIT_BYTES = 64 * 2**20
PLACES = ("forward", "backward", "before-vote")


class DidNotFire(RuntimeError):
    """A fault was injected and nothing shows that it happened: the row would measure nothing."""


@dataclass(frozen=True)
class Struck:
    """A fault that has been done. at: time.monotonic() just before."""

    at: float
    target: str
    is_verdict: reading.IsVerdict
    mend: Callable[[], None] = lambda: None
    check_fired: Callable[[], None] = lambda: None  # raises DidNotFire; called before `mend`


Inject = Callable[[BenchJob, int], Struck]


@dataclass(frozen=True)
class Row:
    """kind decides the aim. limit_s: how long a verdict is awaited; hold_s: how long none may come."""

    name: str
    kind: Literal["process", "hang", "node", "planned", "nothing"]
    inject: Inject
    limit_s: float = 60.0
    hold_s: float = 0.0
    note: str = ""
    settings: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def expects(self) -> str:
        return "nothing" if self.kind == "nothing" else "verdict"

    def aim_s(self, step_s: float) -> float | None:
        aims = {"process": PROCESS_AIM_S, "node": NODE_AIM_S, "hang": max(HANG_AIM_S, 3 * step_s)}
        return aims.get(self.kind)


# ---- faults of a process


def ordered(kind: str, place: str = "") -> Inject:
    """The worker does it itself, at a place of its step."""

    def inject(job: BenchJob, number: int) -> Struck:
        rank = job.a_rank(number)
        fault = Fault(f"{kind}-{number}", rank, place or random.choice(PLACES), kind, step=0)
        job.orders.give(fault)
        await_fired(job, fault)
        return Struck(job.faults.fired()[fault.id].mono, f"rank {rank}", reading.is_worker_lost(rank))

    return inject


def await_fired(job: BenchJob, fault: Fault) -> None:
    """Until the victim has written that it does it; raises DidNotFire."""
    deadline = time.monotonic() + FIRE_TIMEOUT_S
    while not job.faults.has_fired(fault.id):
        if time.monotonic() > deadline:
            raise DidNotFire(f"{fault.kind} of rank {fault.rank} at {fault.place}: not within {FIRE_TIMEOUT_S:g} s")
        time.sleep(0.005)


def run_out_of_memory(job: BenchJob, number: int) -> Struck:
    """The kernel ends the worker for want of memory, within a limit that is set for it alone."""
    rank = job.a_rank(number)
    pid = job.worker_pid(rank)
    fault = Fault(f"oom-{number}", rank, random.choice(PLACES), "oom", step=0)
    pidfd = os.pidfd_open(pid)
    try:
        with MemoryGroup.find(OOM_LIMIT_BYTES) as group:
            group.take(pid)
            job.orders.give(fault)
            await_fired(job, fault)
            deadline = time.monotonic() + FIRE_TIMEOUT_S
            while group.num_killed() == 0:
                if time.monotonic() > deadline:
                    raise DidNotFire(f"the kernel did not end rank {rank} at its memory limit")
                time.sleep(0.005)
    finally:
        os.close(pidfd)
    return Struck(last_stamp(job.faults, fault.id), f"rank {rank}", reading.is_worker_lost(rank))


def kill_in_place_of_oom(job: BenchJob, number: int) -> Struck:
    """What an OOM kill is to everybody else, on machines without memory cgroups; the row says so."""
    rank = job.a_rank(number)
    pid, at = job.worker_pid(rank), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return Struck(at, f"rank {rank}", reading.is_worker_lost(rank))


def _oom() -> Row:
    try:
        with MemoryGroup.find(OOM_LIMIT_BYTES):
            return Row("OOM kill", "process", run_out_of_memory, note="real, by the kernel")
    except NoMemoryGroup as error:
        return Row("OOM kill", "process", kill_in_place_of_oom, note=f"SIGKILL in its place: {error}")


# ---- faults of a node


def cut_power(job: BenchJob, number: int) -> Struck:
    node = job.node_of(job.a_rank(number))
    at = job.cluster.cut_power(node)
    return _node_struck(job, node, at)


def partition(network: str, direction: str = "both") -> Inject:
    def inject(job: BenchJob, number: int) -> Struck:
        node = job.node_of(job.a_rank(number))
        if network != "control":
            job.assert_trains_over_fabric(node)
        at = job.cluster.partition(node, network, direction)  # type: ignore[arg-type]

        def check_fired() -> None:
            if direction != "both" and job.cluster.dropped(node) == 0:
                raise DidNotFire(f"no packet of {node} was dropped")

        return _node_struck(job, node, at, check_fired)

    return inject


def _node_struck(job: BenchJob, node: str, at: float, check_fired: Callable[[], None] = lambda: None) -> Struck:
    return Struck(at, node, reading.is_condemned(node), lambda: job.cluster.heal(node), check_fired)


def drain(job: BenchJob, number: int) -> Struck:
    """As an administrator does; the node is swapped at a step boundary."""
    node, at = job.node_of(job.a_rank(number)), time.monotonic()
    _scontrol(job, node, "state=drain", "reason=bench")
    return Struck(at, node, reading.is_leaving(node), lambda: _scontrol(job, node, "state=resume"))


def _scontrol(job: BenchJob, node: str, *words: str) -> None:
    job.cluster.run(["scontrol", "update", f"nodename={node}", *words])


# ---- a sick GPU, as NVML would tell it


FAKE_NVML = ROOT / "flashrec/testing/fake_nvml"
XID = 79  # the GPU has fallen off the bus


def report_xid(folder: Path) -> Inject:
    """NVML is played by flashrec.testing.fake_nvml (no GPU is here), by files in `folder`; all that follows is real."""

    def inject(job: BenchJob, number: int) -> Struck:
        node = job.node_of(job.a_rank(number))
        path = folder / f"{node}.xid"
        draft, at = path.with_suffix(".new"), time.monotonic()
        draft.write_text(f"0 {XID}")
        draft.replace(path)

        def check_fired() -> None:
            if path.exists():
                raise DidNotFire(f"nobody on {node} asked NVML for Xids")

        def mend() -> None:
            """A reset GPU needs a new look: a new agent, which knows nothing of the Xid."""
            os.kill(job.agent_pid(node), signal.SIGKILL)

        return Struck(at, node, reading.is_leaving(node), mend, check_fired)

    return inject


# ---- what must not be taken for a failure


def lose(percent: int) -> Inject:
    def inject(job: BenchJob, number: int) -> Struck:
        node = job.node_of(job.a_rank(number))
        at = job.cluster.lose(node, percent)

        def check_fired() -> None:
            if job.cluster.dropped(node) == 0:
                raise DidNotFire(f"no packet of {node} was dropped")

        return _node_struck(job, node, at, check_fired)

    return inject


def kill_slurmd(job: BenchJob, number: int) -> Struck:
    node = job.node_of(job.a_rank(number))
    pid = next(each.slurmd_pid for each in job.cluster.status().nodes if each.name == node)
    if pid is None:
        raise JobTrouble(f"no slurmd on {node}")
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def check_fired() -> None:
        if any(each.name == node and each.slurmd_pid is not None for each in job.cluster.status().nodes):
            raise DidNotFire(f"slurmd on {node} lives")

    return Struck(at, node, reading.is_condemned(node), lambda: job.cluster.start_daemon(node), check_fired)


def all_rows(work: Path) -> list[Row]:
    """In the order of the table. `work`: a folder that all nodes see."""
    nvml = {
        "PYTHONPATH": f"{FAKE_NVML}:{ROOT}",
        "FLASHREC_FAKE_NVML": str(work / "nvml"),
    }
    return [
        Row("process exits", "process", ordered("exit")),
        Row("SIGSEGV", "process", ordered("SIGSEGV")),
        _oom(),
        Row("SIGSTOP", "hang", ordered("SIGSTOP")),
        Row("GIL hang", "hang", ordered("gil"), limit_s=120),
        Row("collective hang", "hang", ordered("hang", "backward"), limit_s=120, note="sleeps, its peers wait"),
        Row("power cut", "node", cut_power),
        Row("partition of both networks", "node", partition("both")),
        Row("partition of the fabric", "node", partition("fabric")),
        Row("partition of the control network", "node", partition("control")),
        Row("one-way loss, in", "node", partition("both", "in"), note="the node hears nobody"),
        Row("one-way loss, out", "node", partition("both", "out"), note="nobody hears the node"),
        Row("30 % packet loss", "nothing", lose(30), hold_s=10, note="both networks of a node, 10 s"),
        Row("slurmd killed", "nothing", kill_slurmd, hold_s=5, note="5 s"),
        Row("node drained", "planned", drain, note="to the start of the planned swap; Slurm is asked every 5 s"),
        Row(
            "NVML Xid",
            "planned",
            report_xid(work / "nvml"),
            note="NVML played; to the start of the planned swap",
            env=nvml,
        ),
    ]
