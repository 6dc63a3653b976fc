"""Slurm notices: a lost node is marked DOWN during the job, and the job shrinks under the recovery's feet.

Elsewhere Slurm is made slow to notice, which is the rule. Here an operator marks one node DOWN before we have a
verdict, Slurm itself finds the next one, and after that steps must still start in what is left of the job.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.slurm.hostlist import expand
from flashrec.testing import Fault
from tests.e2e.cluster_job import NodeJob
from tests.e2e.support import report_of
from tests.support.cluster import dev_cluster

pytestmark = [pytest.mark.devcluster, pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with dev_cluster(num_nodes=5, slurmd_timeout_s=10, extra_conf=("MessageTimeout=3",)) as cluster:
        yield cluster


def nodes_of(job: NodeJob) -> set[str]:
    """The nodes of the job, as Slurm sees it now."""
    done = job.cluster.run(["squeue", "--noheader", "--jobs", str(job.submitted.id), "--format", "%N"])
    return set(expand(done.stdout.strip()))


def left(job: NodeJob) -> list[str]:
    """The nodes of which the manager noted that they left the job."""
    return [line["node"] for line in job.journal.lines() if line.get("what") == "node left the job"]


def test_slurm_takes_lost_nodes_from_the_job(cluster: DevCluster, node_job, undisturbed_job) -> None:
    calm = undisturbed_job(3, 16)
    faults = [
        Fault("told", rank=1, place="backward", kind="request", step=3),
        Fault("noticed", rank=0, place="forward", kind="request", step=6),
        Fault("stand", rank=1, place="forward", kind="request", step=9),  # the job stands still meanwhile
        Fault("in-place", rank=2, place="backward", kind="SIGKILL", step=9),
    ]
    job = node_job(nodes=5, spares=2, steps=16, faults=faults)

    def cut_and_mark(node: str) -> float:
        cut_at = cluster.cut_power(node)
        cluster.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=power"])
        assert node not in nodes_of(job), "the job has shrunk before we have a verdict"
        assert job.journal.resumes() == 0
        return cut_at

    told = job.hit("told", cut_and_mark)
    job.journal.wait_for(lambda: told in left(job), "the manager sees that the node left the job", 30)
    noticed = job.hit("noticed", cluster.cut_power)
    job.faults.await_armed("stand", 60)
    assert job.journal.resumes() == 2
    job.journal.wait_for(lambda: noticed in left(job), "Slurm marks the silent node DOWN", 90)
    assert nodes_of(job) == {"n0", "n3", "n4"}
    cluster.heal(told)
    job.faults.mark_fired("stand", 0.0)  # a victim of nothing: it goes on, and rank 2 is killed in the same step
    job.finish(calm, recoveries=3)

    assert left(job) == [told, noticed], "each is said once"
    third = report_of(job.job_dir)["recoveries"][2]["launched"]
    assert third == ["rank 2 on n3"], "a step started in what was left of the job"
    launched = [line["nodes"] for line in job.journal.lines() if line.get("what") == "agents launched"]
    assert [told] not in launched, "a node that is not ours any more is not asked, not even when it is healthy again"
