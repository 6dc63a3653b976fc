"""Twenty power cuts, one after another, in one job: nothing may grow with the number of recoveries.

The survivors are measured from outside (/proc) while the job stands still: the next victim waits at its place for its
power cut, so every recovery is over. A line is fitted through the recoveries after the first few, which fill caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault
from tests.e2e.cluster_job import PLACES, NodeJob
from tests.e2e.support import report_of
from tests.support.cluster import dev_cluster

pytestmark = [pytest.mark.devcluster, pytest.mark.torch, pytest.mark.timeout(600)]

NUM_CUTS = 20
WARM_UP = 5
MAX_COUNT_PER_RECOVERY = 0.2  # a pool may take one thread more; a sample may meet a call of squeue
MAX_KB_PER_RECOVERY = 100.0  # one copy of the parameters of this small model is 170
SURVIVOR_RANK, SURVIVOR_NODE, MANAGER_NODE = 2, "n3", "n0"


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with dev_cluster(num_nodes=5, slurmd_timeout_s=3600) as cluster:
        yield cluster


class Usage(msgspec.Struct, frozen=True):
    """What one process holds. anonymous_kb: memory that is its own and no file's."""

    fds: int
    threads: int
    anonymous_kb: int


def usage_of(pid: int) -> Usage:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    anonymous_kb = next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
    fds, threads = (len(list(Path(f"/proc/{pid}/{name}").iterdir())) for name in ("fd", "task"))
    return Usage(fds, threads, anonymous_kb)


def slope(values: Sequence[float]) -> float:
    """Growth per recovery after the warm-up, by least squares."""
    tail = values[WARM_UP:]
    return statistics.linear_regression(range(len(tail)), tail).slope


def survivors(cluster: DevCluster, job: NodeJob) -> dict[str, int]:
    """Pid, as seen from here, of every process that must live through all recoveries."""
    found = {}
    for node in (MANAGER_NODE, SURVIVOR_NODE):
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in cluster.processes(node)}
        agents = [pid for pid, line in lines.items() if b"agent\0--manager" in line and not line.startswith(b"srun")]
        assert len(agents) == 1, agents
        found[f"agent {node}"] = agents[0]
    inside = {pid_inside: pid for pid, pid_inside in cluster.processes(MANAGER_NODE).items()}
    found["manager"] = inside[next(line["pid"] for line in job.journal.lines() if line.get("what") == "job started")]
    inside = {pid_inside: pid for pid, pid_inside in cluster.processes(SURVIVOR_NODE).items()}
    started = [event for event in job.journal.events("WorkerStarted") if event["rank"] == SURVIVOR_RANK]
    found[f"rank {SURVIVOR_RANK}"] = inside[started[-1]["pid"]]
    return found


def test_twenty_power_cuts_in_one_job(cluster: DevCluster, node_job, undisturbed_job) -> None:
    faults = [
        Fault(f"cut{index}", rank=index % 2, place=PLACES[index % 5], kind="request", step=3 + 2 * index)
        for index in range(NUM_CUTS)
    ]
    last = Fault("last", rank=0, place="forward", kind="request", step=3 + 2 * NUM_CUTS)  # stands still, loses nothing
    steps = last.step + 2
    calm = undisturbed_job(3, steps)
    job = node_job(nodes=5, spares=2, steps=steps, faults=[*faults, last])

    pids: dict[str, int] = {}
    held: list[dict[str, Usage]] = []
    on_manager_node: list[int] = []
    for count, fault in enumerate([*faults, last]):
        armed = job.faults.await_armed(fault.id, 60)
        pids = pids or survivors(cluster, job)
        held.append({name: usage_of(pid) for name, pid in pids.items()})
        on_manager_node.append(len(cluster.processes(MANAGER_NODE)))
        assert job.journal.resumes() == count
        if fault is last:
            break
        assert armed.node not in (MANAGER_NODE, SURVIVOR_NODE)
        former = job.life(armed.node)
        job.hit(fault.id, cluster.cut_power)
        job.journal.wait_for(lambda: armed.node in dead_nodes(job, count + 1), "the node is found dead", 20)  # noqa: B023
        cluster.heal(armed.node)
        job.await_spare(armed.node, former)
    job.faults.mark_fired(last.id, 0.0)
    job.finish(calm, recoveries=NUM_CUTS)
    show(held, on_manager_node, [recovery["rto_s"] for recovery in report_of(job.job_dir)["recoveries"]])

    for name in pids:
        for what in ("fds", "threads"):
            values = [getattr(sample[name], what) for sample in held]
            assert slope(values) < MAX_COUNT_PER_RECOVERY, f"{name}: {what} {values}"
        growth = slope([sample[name].anonymous_kb for sample in held])
        assert growth < MAX_KB_PER_RECOVERY, f"{name} grows by {growth:.0f} KB per recovery"
    assert slope(on_manager_node) < MAX_COUNT_PER_RECOVERY, f"processes {on_manager_node}"


def dead_nodes(job: NodeJob, least: int) -> list[str]:
    """The nodes found dead, in order, once there are `least`; before that none."""
    dead = [line["subject"].split()[1] for line in job.journal.lines() if line.get("state") == "dead"]
    return dead if len(dead) >= least else []


def show(held: Sequence[dict[str, Usage]], processes: Sequence[int], rto_s: Sequence[float]) -> None:
    """The figures, one line a recovery: file descriptors, threads and anonymous KB of each survivor."""
    names = list(held[0])
    print("\n" + "recovery   rto_s  procs  " + "  ".join(f"{name:>18}" for name in names))
    for index, sample in enumerate(held):
        row = [f"{u.fds:4d} {u.threads:3d} {u.anonymous_kb:9d}" for u in (sample[name] for name in names)]
        rto = f"{rto_s[index - 1]:7.2f}" if index else "      -"
        print(f"{index:8d} {rto} {processes[index]:6d}  " + "  ".join(row))
    kb = "  ".join(f"{slope([sample[name].anonymous_kb for sample in held]):+15.1f} KB" for name in names)
    print(f"memory per recovery      {kb}")
    print(f"rto_s median {statistics.median(rto_s):.2f} max {max(rto_s):.2f}")
