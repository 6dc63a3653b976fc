"""One run of one peer: start, fault, figures. And paired blocks against plain torch, where nothing fails.

Every run has a dev cluster of its own, so that no earlier fault is in its way.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.peers.job import Cell, FaultKind, Job, JobTrouble, Peer
from benchmarks.peers.job_size import NUM_NODES, NUM_RANKS
from benchmarks.peers.reading import Recovery, StepLine, StepLogs, finals, is_at_step, recovery
from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.spec import DEFAULT_STATE_DIR, ClusterSpec, Layout

POLL_S, TURN_POLL_S = 0.01, 0.002
START_TIMEOUT_S, END_TIMEOUT_S, FIRE_TIMEOUT_S = 90.0, 240.0, 10.0
VICTIM = 1  # the rank that is hit; rank 0 has the store of most peers


class DidNotFire(RuntimeError):
    """A fault was injected and the victim lives: the run would measure nothing."""


class Outcome(msgspec.Struct, frozen=True):
    """Of one run. recovery: None if there was no fault; digests: of the processes that finished."""

    recovery: Recovery | None
    digests: tuple[str, ...]


@contextmanager
def cluster_for(peer: Peer, kept: Path | None) -> Iterator[tuple[DevCluster, Path]]:
    """A cluster and a folder that all nodes see; both gone afterwards. `kept`: where the folder is made instead, and
    stays."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="flashrec-peers-", dir=kept))
    name = f"peers-{os.getpid()}"
    socket = Layout(DEFAULT_STATE_DIR, name).munge_socket
    conf = tuple(line.format(socket=socket) for line in peer.conf)
    spec = ClusterSpec(name=name, num_nodes=NUM_NODES, slurmd_timeout_s=peer.slurmd_timeout_s, extra_conf=conf)
    try:
        with DevCluster.up(spec) as cluster:
            yield cluster, folder
    finally:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def job_of(peer: Peer, cell: Cell) -> Iterator[Job]:
    job = peer.start(cell)
    try:
        yield job
    finally:
        job.close()


def run(peer: Peer, fault: FaultKind | None, kept: Path | None = None) -> Outcome:
    """Raises JobTrouble when the job fails or does not go on, DidNotFire, DevClusterError."""
    with cluster_for(peer, kept) as (cluster, folder):
        cell = Cell(cluster, folder, peer.steps, fault, peer.fault_after)
        with job_of(peer, cell) as job:
            logs = StepLogs(cell.out)
            wait_for(job, lambda: is_at_step(logs.read(), 0, NUM_RANKS), "the first step", START_TIMEOUT_S)
            job.settle()
            fault_at = None if fault is None else inject(cell, job, logs, fault)
            wait_for(job, lambda: len(finals(cell.out)) >= NUM_RANKS, "the end of training", END_TIMEOUT_S)
            found = None if fault_at is None else recovery(logs.read(), fault_at, NUM_RANKS)
            return Outcome(found, tuple(finals(cell.out).values()))


def pair_up(peer: Peer, reference: Peer, blocks: int, block: int, kept: Path | None = None) -> tuple[list[float], bool]:
    """Blocks of steps of both, in turns, nothing failing: ratios of seconds, and whether both end with the same bits.

    The first pair does not count. Raises as `run`.
    """
    with cluster_for(peer, kept) as (cluster, folder):
        turns = folder / "turns"
        turns.mkdir()
        cells = {
            name: Cell(cluster, folder / name, (blocks + 1) * block, turns=f"{turns}:{name}", block=block)
            for name in ("plain", "peer")
        }
        with job_of(reference, cells["plain"]) as plain, job_of(peer, cells["peer"]) as other:
            jobs = {"plain": plain, "peer": other}
            seconds: dict[str, list[float]] = {name: [] for name in jobs}
            for number in range(blocks + 1):
                for name in list(jobs)[:: 1 if number % 2 else -1]:
                    seconds[name].append(take_turn(jobs[name], turns, f"{name}.{number}"))
            for name, job in jobs.items():
                out = cells[name].out
                wait_for(job, lambda out=out: len(finals(out)) >= NUM_RANKS, "the end", END_TIMEOUT_S)  # type: ignore[misc]
            ends = {digest for cell in cells.values() for digest in finals(cell.out).values()}
    return [p / q for p, q in zip(seconds["peer"][1:], seconds["plain"][1:], strict=True)], len(ends) == 1


def take_turn(job: Job, turns: Path, turn: str) -> float:
    """Let a job do a block; seconds until all its ranks have done it."""
    began = time.monotonic()
    (turns / turn).touch()
    wait_for(job, lambda: len(list(turns.glob(f"{turn}.*"))) >= NUM_RANKS, f"block {turn}", END_TIMEOUT_S, TURN_POLL_S)
    return time.monotonic() - began


def wait_for(job: Job, condition: Callable[[], object], what: str, timeout_s: float, poll_s: float = POLL_S) -> None:
    deadline, look_at = time.monotonic() + timeout_s, 0.0
    while not condition():
        now = time.monotonic()
        if now > deadline:
            raise JobTrouble(f"{what}: not within {timeout_s:g} s\n{job.logs()}")
        if now > look_at:
            if (trouble := job.trouble()) and not condition():
                raise JobTrouble(f"{what}: {trouble}")
            look_at = now + 2.0
        time.sleep(poll_s)


def inject(cell: Cell, job: Job, logs: StepLogs, fault: FaultKind) -> float:
    """Hit the victim once it has finished its step; return time.monotonic() just before."""

    def hit() -> StepLine | None:
        return next((x for x in logs.read() if x.rank == VICTIM and x.step == cell.fault_after), None)

    wait_for(job, hit, f"step {cell.fault_after} of rank {VICTIM}", START_TIMEOUT_S)
    victim = hit()
    assert victim is not None
    if fault == "process":
        return kill(cell.cluster, victim)
    at = cell.cluster.cut_power(victim.node)
    job.replace(victim.node)
    if cell.cluster.processes(victim.node):
        raise DidNotFire(f"{victim.node} still has processes")
    return at


def kill(cluster: DevCluster, victim: StepLine) -> float:
    found = [outer for outer, inner in cluster.processes(victim.node).items() if inner == victim.pid]
    if not found:
        raise DidNotFire(f"no process {victim.pid} on {victim.node}, where rank {victim.rank} should be")
    pidfd = os.pidfd_open(found[0])
    try:
        at = time.monotonic()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not select.select([pidfd], [], [], FIRE_TIMEOUT_S)[0]:
            raise DidNotFire(f"rank {victim.rank} survived SIGKILL")
        return at
    finally:
        os.close(pidfd)
