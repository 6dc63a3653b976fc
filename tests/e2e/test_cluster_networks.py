"""Two networks that disagree, on a real cluster with heartbeats over real MPI: the fabric of a node is lost, then the
control network of another. Training itself uses the control network here, so each victim waits at its fault until the
verdict has fallen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.spec import ClusterSpec
from flashrec.testing import Fault
from tests.e2e.cluster_job import NodeJob
from tests.support.cluster import dev_cluster

pytestmark = [pytest.mark.devcluster, pytest.mark.torch, pytest.mark.timeout(400)]

NUM_NODES, STEPS = 4, 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with dev_cluster(num_nodes=NUM_NODES, slurmd_timeout_s=3600, fabric=True) as cluster:
        yield cluster


def lines(job: NodeJob, **fields: str) -> list[dict[str, Any]]:
    return [line for line in job.journal.lines() if fields.items() <= line.items()]


def cut(job: NodeJob, network: str, subject: str, cluster: DevCluster):
    """Cut a node off from one network, and wait for the verdict."""

    def perform(node: str) -> float:
        at = cluster.partition(node, network)
        dead = {"kind": "verdict", "subject": f"{subject} {node}", "state": "dead"}
        job.journal.wait_for(lambda: lines(job, **dead), f"a verdict on the {subject} {node}", 60)
        return at

    return perform


def test_the_network_that_is_lost_is_named(cluster: DevCluster, node_job, undisturbed_job) -> None:
    faults = [
        Fault("fabric", rank=1, place="backward", kind="request", step=4),
        Fault("control", rank=0, place="backward", kind="request", step=10),
    ]
    fabric = ClusterSpec(num_nodes=NUM_NODES, fabric=True).address("n0", "fabric").rpartition(".")[0] + ".0/24"
    job = node_job(
        nodes=NUM_NODES, spares=2, steps=STEPS, faults=faults,
        settings=("fabric.mpi=required", f"fabric.interface={fabric}"),
    )  # fmt: skip
    job.faults.await_armed("fabric", 120)
    sessions = {"kind": "note", "what": "fabric session"}
    job.journal.wait_for(lambda: len(lines(job, **sessions)) >= NUM_NODES, "MPI sessions with all nodes", 60)

    node = job.hit("fabric", cut(job, "fabric", "fabric link of node", cluster))
    (link,) = lines(job, kind="verdict", subject=f"fabric link of node {node}", state="dead")
    assert "the control path answers" in link["reason"] and "cannot reach it over the fabric" in link["reason"]
    job.journal.wait_for(lambda: job.journal.resumes() >= 1, "training goes on elsewhere", 90)
    assert job.life(node) == 1, "its agent lives"
    assert not lines(job, kind="verdict", subject=f"node {node}", state="dead")
    cluster.heal(node)
    mended = {"kind": "verdict", "subject": f"fabric link of node {node}", "state": "alive"}
    job.journal.wait_for(lambda: lines(job, **mended), "the link is mended", 90)

    node = job.hit("control", cut(job, "control", "node", cluster))
    (lost,) = lines(job, kind="verdict", subject=f"node {node}", state="dead")
    assert "MPI heartbeats still come: the control network is lost" in lost["reason"]
    assert lines(job, kind="note", what="detection", node=node), "it was given time, and that was said"
    job.finish(undisturbed_job(2, STEPS), recoveries=2)
