"""Jobs without spares of their own lose a node and get one from a pool, as a user without privileges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault
from tests.e2e.cluster_job import NodeJob
from tests.e2e.support import assert_no_process
from tests.support.cluster import dev_cluster, wait_for
from tests.support.people import unprivileged

pytestmark = [pytest.mark.devcluster, pytest.mark.torch, pytest.mark.timeout(300)]
POOL = "flashspare"
CUT = Fault("cut", rank=1, place="backward", kind="request", step=4)
CONFIGURATIONS = {"plain": (), "prolog-flags": ("PrologFlags=Alloc,Contain",)}


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def cluster(request: pytest.FixtureRequest) -> Iterator[DevCluster]:
    """Node n4 is the pool."""
    with dev_cluster(num_nodes=5, slurmd_timeout_s=3600, extra_conf=CONFIGURATIONS[request.param]) as cluster:
        make_pool(cluster)
        yield cluster


def make_pool(cluster: DevCluster) -> None:
    user = unprivileged().name
    cluster.run(["scontrol", "create", "reservation", f"reservationname={POOL}", "nodes=n4", f"users={user}",
                 "starttime=now", "duration=infinite"])  # fmt: skip


@pytest.fixture
def pool_job(node_job: Callable[..., NodeJob]) -> Callable[..., NodeJob]:
    return partial(node_job, spares=0, options=f"--pool {POOL}", person=unprivileged())


@pytest.fixture(scope="module")
def calm(cluster: DevCluster, folder: Path) -> Callable[[int, int], Path]:
    """The numbers of a job of that user that lost nothing (the data are those of their Python), by (ranks, steps)."""
    known: dict[tuple[int, int], Path] = {}

    def run(ranks: int, steps: int) -> Path:
        if (ranks, steps) not in known:
            name = f"calm-{cluster.spec.name}-{ranks}-{steps}"
            job = NodeJob(cluster, folder, name, nodes=ranks, spares=0, steps=steps, person=unprivileged())
            try:
                job.finish(None)
            finally:
                job.close()
            known[ranks, steps] = job.out
        return known[ranks, steps]

    return run


def companions(cluster: DevCluster) -> list[str]:
    """Companion jobs that Slurm has, as 'STATE NODE'."""
    done = cluster.run(["squeue", "--noheader", "--all", "--format", "%j %T %N"])
    return [line.split(" ", 1)[1].strip() for line in done.stdout.splitlines() if line.startswith("flashrec-spare-")]


def node_state(cluster: DevCluster, node: str) -> str:
    return cluster.run(["sinfo", "--noheader", "--nodes", node, "--format", "%T"]).stdout.strip()


def notes(job: NodeJob, what: str) -> list[dict]:
    return [line for line in job.journal.lines() if line.get("what") == what]


def assert_given_back(cluster: DevCluster, node: str = "n4") -> None:
    wait_for(lambda: not companions(cluster), "no companion job is left", 60)
    wait_for(lambda: node_state(cluster, node) in ("idle", "reserved"), f"node {node} is idle again", 60)


def test_a_lost_node_is_replaced_from_the_pool(cluster: DevCluster, pool_job, calm) -> None:
    undisturbed = calm(3, 30)
    job = pool_job(nodes=3, steps=30, faults=[CUT])
    job.hit("cut", cluster.cut_power)
    job.journal.wait_for(lambda: notes(job, "companion granted"), "a companion job", 120)
    assert companions(cluster) == ["RUNNING n4"]
    job.finish(undisturbed, recoveries=1)
    (granted,) = notes(job, "companion granted")
    assert granted["node"] == "n4"
    assert f"(companion job {granted['companion']})" in job.submitted.output.read_text()
    assert_given_back(cluster)
    assert_no_process(str(job.out))
    assert_no_process(str(job.job_dir / "secret"))
