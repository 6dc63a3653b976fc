"""Hot spares under Slurm: a killed process and a power cut, each replaced by a parked task; the bits are the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.spec import ClusterSpec
from flashrec.testing import Fault
from tests.e2e.support import processes_with

pytestmark = [pytest.mark.devcluster, pytest.mark.torch]
NUM_NODES = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster.up(ClusterSpec(name=f"hot-{os.getpid()}", num_nodes=NUM_NODES, slurmd_timeout_s=3600)) as it:
        yield it


def test_a_killed_process_and_a_lost_node_are_replaced_by_parked_tasks(
    cluster: DevCluster, node_job, undisturbed_job, folder: Path
) -> None:
    undisturbed = undisturbed_job(2, 12)
    faults = [Fault("process", 1, "backward", "request", step=3), Fault("node", 1, "before-vote", "request", step=7)]
    job = node_job(nodes=NUM_NODES, spares=2, steps=12, faults=faults, settings=("hot.park=imports", "hot.after_s=0.1"))

    def notes(what: str) -> list[dict]:
        return [line for line in job.journal.lines() if line.get("what") == what]

    def await_parked(count: int) -> None:
        job.journal.wait_for(lambda: len(notes("parked")) >= count, f"{count} parked tasks", 120)

    def kill_worker(node: str) -> float:
        await_parked(NUM_NODES)
        inside = [e["pid"] for e in job.journal.events("WorkerStarted") if e["rank"] == 1][-1]
        (pid,) = [out for out, number in cluster.processes(node).items() if number == inside]
        now = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return now

    first = job.hit("process", kill_worker)
    second = job.hit("node", cluster.cut_power)
    assert first == second
    job.finish(undisturbed, recoveries=2)
    used = [(note["node"], note["rank"], note["incarnation"]) for note in notes("parked task used")]
    assert used[0] == (first, 1, 2)
    assert used[1][0] in job.nodes[2:] and used[1][1:] == (1, 3)
    assert len(list((job.job_dir / "logs").glob("step-*.log"))) == 1, "no other job step for workers"
    deadline = time.monotonic() + 20
    while left := {pid: line for pid, line in processes_with(str(job.folder)).items() if "agent.park" in line}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
