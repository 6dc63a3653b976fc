"""Node-level faults on a real Slurm cluster: power cuts and partitions at each place of a step and during a recovery,
two nodes at once, a spare that dies while it joins, no spare left, a controller that is away.

One long job takes many faults, one after another: a lost node is healed and returns as a spare before the next.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault
from flashrec.testing.jobs import path_with
from tests.e2e.cluster_job import PLACES
from tests.e2e.support import (
    TRAIN,
    assert_no_process,
    processes_with,
    report_of,
)
from tests.support.cluster import dev_cluster

pytestmark = [pytest.mark.devcluster, pytest.mark.torch, pytest.mark.timeout(600)]

NUM_NODES = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with dev_cluster(num_nodes=NUM_NODES, slurmd_timeout_s=3600) as cluster:
        yield cluster


@pytest.mark.parametrize("kind", ["power-cut", "partition"])
def test_node_fault_at_each_place(kind: str, cluster: DevCluster, node_job, undisturbed_job) -> None:
    """Five faults in one job, one at each place; the lost node is healed and returns before the next."""
    steps, ranks = 24, (1, 0, 2, 0, 2)  # rank 1 moves to the batch host and stays there
    faults = [
        Fault(place, rank=rank, place=place, kind="request", step=3 + 4 * index)
        for index, (place, rank) in enumerate(zip(PLACES, ranks, strict=True))
    ]
    job = node_job(nodes=4, spares=1, steps=steps, faults=faults)
    perform = cluster.cut_power if kind == "power-cut" else cluster.partition
    for fault in faults:
        node = job.hit(fault.id, perform)
        assert node != job.nodes[-1], "the batch host is not the victim"
        former = job.life(node)
        count = job.faults.fired().__len__()
        job.journal.wait_for(lambda: job.journal.resumes() >= count, f"recovery {count}", 90)  # noqa: B023
        former_workers = workers_on(cluster, node)
        if kind == "partition":
            assert cluster.processes(node), "a partition kills nothing"
        cluster.heal(node)
        job.await_spare(node, former)
        assert not former_workers & workers_on(cluster, node), "a former life of a rank outlived its node's return"
    job.finish(undisturbed_job(3, steps), recoveries=len(faults))
    for recovery in report_of(job.job_dir)["recoveries"]:
        assert "silent for" in recovery["reasons"][0]


@pytest.mark.parametrize("kind", ["power-cut", "partition"])
def test_spare_lost_while_it_joins(kind: str, cluster: DevCluster, node_job, undisturbed_job) -> None:
    """A node is lost; the spare that takes over is lost while its worker joins; the second spare takes over."""
    faults = [
        Fault("first", rank=1, place="backward", kind="request", step=4),
        Fault("second", rank=1, place="join", kind="request", life=1),
    ]
    job = node_job(nodes=5, spares=2, steps=10, faults=faults)
    perform = cluster.cut_power if kind == "power-cut" else cluster.partition
    lost = [job.hit("first", perform), job.hit("second", perform)]
    assert len(set(lost)) == 2
    job.finish(undisturbed_job(3, 10), recoveries=1)
    last = report_of(job.job_dir)["recoveries"][0]["launched"][-1]
    assert last == f"rank 1 on {job.nodes[-1]}", "the batch host is the last spare"


def workers_on(cluster: DevCluster, node: str) -> set[int]:
    """Training processes that live on a node."""
    return cluster.processes(node).keys() & processes_with(str(TRAIN)).keys()


def test_two_nodes_at_once_with_two_spares(cluster: DevCluster, node_job, undisturbed_job) -> None:
    faults = [Fault("both", rank=1, place="in-collective", kind="request", step=4, holder=0)]
    job = node_job(nodes=5, spares=2, steps=10, faults=faults)
    armed = job.faults.await_armed("both", 120)
    other = next(node for node in job.nodes[1:3] if node != armed.node)  # that of rank 0 holds the victim back
    cluster.cut_power(other)
    job.faults.mark_fired("both", cluster.cut_power(armed.node))
    job.finish(undisturbed_job(3, 10), recoveries=1)
    dead = {line["subject"] for line in job.journal.lines() if line["kind"] == "verdict" and line["state"] == "dead"}
    assert dead == {f"node {armed.node}", f"node {other}"}


def test_no_spare_left_is_a_clear_end(cluster: DevCluster, node_job) -> None:
    faults = [Fault("cut", rank=1, place="backward", kind="request", step=4)]
    job = node_job(nodes=3, spares=0, steps=50, faults=faults, settings=("recovery.spare_wait_s=3",))
    node = job.hit("cut", cluster.cut_power)
    job.submitted.wait(120)
    assert job.submitted.exit_code() == 75
    last = job.submitted.output.read_text().splitlines()[-1]
    assert "no spare is left for rank 1" in last
    assert node in last and "silent" in last
    assert_no_process(str(job.out))
    assert_no_process(str(job.job_dir / "secret"))


def test_controller_away_during_a_recovery(cluster: DevCluster, node_job, undisturbed_job) -> None:
    """slurmctld is stopped when the node is lost and comes back 20 s later: the job waits for it and completes."""
    faults = [Fault("cut", rank=1, place="backward", kind="request", step=4)]
    job = node_job(nodes=4, spares=1, steps=10, faults=faults)
    job.faults.await_armed("cut", 120)
    cluster.stop_daemon("slurmctld")
    try:
        job.hit("cut", cluster.cut_power)
        job.journal.wait_for(lambda: ("FENCING", "PLACING", 2) in job.journal.phases(), "survivors are fenced", 30)
        time.sleep(20)  # the outage itself is what is tested
        assert job.journal.resumes() == 0
    finally:
        cluster.start_daemon("slurmctld")
    job.finish(undisturbed_job(3, 10), recoveries=1)


def test_an_agent_that_is_killed_is_started_again_as_a_spare(cluster: DevCluster, node_job, undisturbed_job) -> None:
    """An agent's death costs its node's workers; the spare takes over, and the node returns with a new agent."""
    faults = [Fault("kill", rank=1, place="backward", kind="request", step=4)]
    job = node_job(nodes=4, spares=1, steps=40, faults=faults)
    armed = job.faults.await_armed("kill", 120)
    inside = cluster.processes(armed.node)
    agents = [pid for pid in inside if b"agent\0--manager" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(agents) == 1
    cluster.run(["kill", "-9", str(inside[agents[0]])], node=armed.node)
    job.faults.mark_fired("kill", time.monotonic())
    job.await_spare(armed.node, 1)
    job.finish(undisturbed_job(3, 40), recoveries=1)


def test_an_allocation_that_cannot_survive_is_refused(cluster: DevCluster, folder: Path) -> None:
    env = {"PATH": path_with(Path(sys.executable).parent)}
    command = ["flashrec", "run", "--job-dir", str(folder / "refused"), "--", "true"]
    one = cluster.run(["srun", "-N1", *command], env=env, cwd=folder, check=False)
    assert one.returncode == 64
    assert "one node" in one.stderr and "--no-kill" in one.stderr
    told = cluster.run(
        ["salloc", "-N2", *command], env=env | {"FLASHREC_SUBMIT_LINE": "sbatch -N2 x"}, cwd=folder, check=False
    )
    assert told.returncode == 64 and "without --no-kill" in told.stderr
    untold = cluster.run(["salloc", "-N2", "--no-kill", *command], env=env, cwd=folder, check=False)
    assert untold.returncode == 0, untold.stderr
    assert "cannot tell whether this job was submitted with --no-kill" in untold.stderr
    assert not (folder / "refused" / "secret").exists()
