"""Jobs without spares of their own lose a node and get one from a pool, as a user without privileges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault
from tests.e2e.cluster_job import NodeJob
from tests.e2e.support import assert_no_process, report_of
from tests.support.cluster import dev_cluster, wait_for
from tests.support.people import unprivileged

pytestmark = [pytest.mark.devcluster, pytest.mark.torch, pytest.mark.timeout(600)]
POOL = "flashspare"
CUT = Fault("cut", rank=0, place="backward", kind="request", step=4)
STAND = Fault("stand", rank=0, place="forward", kind="request", step=8)  # a victim of nothing: it waits for a word


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """Node n4 is the pool."""
    with dev_cluster(num_nodes=5, slurmd_timeout_s=3600) as cluster:
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
    """The numbers of a job of that user that lost nothing (the data are those of their Python)."""
    known: dict[tuple[int, int], Path] = {}

    def run(ranks: int, steps: int) -> Path:
        if (ranks, steps) not in known:
            name = f"calm-{cluster.spec.name}-{ranks}-{steps}"
            job = NodeJob(
                cluster, folder, name, nodes=2, per_node=ranks // 2, spares=0, steps=steps, person=unprivileged()
            )
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
    undisturbed = calm(4, 30)
    job = pool_job(nodes=2, per_node=2, steps=30, faults=[CUT])
    job.hit("cut", cluster.cut_power)
    job.journal.wait_for(lambda: notes(job, "companion granted"), "a companion job", 120)
    assert companions(cluster) == ["RUNNING n4"]
    job.finish(undisturbed, recoveries=1)
    (granted,) = notes(job, "companion granted")
    assert granted["node"] == "n4"
    assert f"(companion job {granted['companion']})" in job.submitted.output.read_text()
    assert report_of(job.job_dir)["recoveries"][0]["launched"] == ["ranks 0, 1 on n4"]
    assert_given_back(cluster)
    assert_no_process(str(job.out))
    assert_no_process(str(job.job_dir / "secret"))


def test_two_jobs_and_one_spare(cluster: DevCluster, pool_job, calm) -> None:
    """One gets it; the other is told who has it, waits, and gets it when the first one ends."""
    undisturbed = calm(2, 12)
    first = pool_job(nodes=2, steps=12, faults=[CUT, STAND])
    second = pool_job(nodes=2, steps=12, faults=[CUT], settings=("pool.wait_s=200",))
    second.faults.await_armed("cut", 120)
    first.hit("cut", cluster.cut_power)
    first.faults.await_armed("stand", 120)
    second.hit("cut", cluster.cut_power)
    second.journal.wait_for(lambda: second.journal.events("NodeRefused"), "it is told to wait", 60)
    assert companions(cluster)[::-1] == ["RUNNING n4", "PENDING"] or companions(cluster) == ["RUNNING n4", "PENDING"]
    told = second.journal.events("NodeRefused")[0]
    assert (told["reason"], told["may_retry"]) == ("pool flashspare: no node free: 1 of 1 in use", True)
    assert f"{told['reason']}; waiting up to 200 s" in second.submitted.output.read_text()
    first.faults.mark_fired("stand", 0.0)
    first.finish(undisturbed, recoveries=1)
    second.finish(undisturbed, recoveries=1)
    assert [note["node"] for note in notes(second, "companion granted")] == ["n4"]
    assert_given_back(cluster)


def test_a_pool_without_a_free_node_is_a_clear_end(cluster: DevCluster, pool_job) -> None:
    sleep = ["sbatch", "--parsable", "-N1", f"--reservation={POOL}", "--output=/dev/null", "--wrap=sleep 600"]
    other = cluster.run(sleep, user=unprivileged().name, cwd="/tmp").stdout.strip()
    wait_for(lambda: node_state(cluster, "n4") == "allocated", "another job has the node", 30)
    job = pool_job(nodes=2, steps=50, faults=[CUT], settings=("pool.wait_s=5", "recovery.spare_wait_s=3"))
    node = job.hit("cut", cluster.cut_power)
    job.submitted.wait(120)
    assert job.submitted.exit_code() == 75
    last = job.submitted.output.read_text().splitlines()[-1]
    assert f"no spare is left for rank 0 (node {node}: silent" in last
    assert last.endswith("; pool flashspare: no node free: 1 of 1 in use; waited 5 s")
    assert not companions(cluster), "nothing is left in the queue"
    cluster.run(["scancel", other])
    assert_given_back(cluster)


def test_a_companion_job_that_is_cancelled_is_a_lost_node(cluster: DevCluster, pool_job, calm) -> None:
    undisturbed = calm(2, 12)
    job = pool_job(nodes=2, steps=12, faults=[CUT, STAND])
    job.hit("cut", cluster.cut_power)
    job.faults.await_armed("stand", 120)
    (granted,) = notes(job, "companion granted")
    cluster.run(["scancel", str(granted["companion"])])
    # Slurm may take seconds to end its tasks: the victim stands until it is lost, or it could do the last steps first.
    job.journal.wait_for(lambda: len(notes(job, "companion granted")) == 2, "another companion job", 120)
    job.faults.mark_fired("stand", 0.0)
    job.finish(undisturbed, recoveries=2)
    first, second = notes(job, "companion granted")
    assert second["node"] == "n4" and second["companion"] != first["companion"]
    assert_given_back(cluster)


def test_a_node_from_the_pool_is_lost_as_any_node(cluster: DevCluster, pool_job, calm) -> None:
    undisturbed = calm(2, 12)
    cluster.run(["scontrol", "update", f"reservationname={POOL}", "nodes=n3,n4"])
    try:
        again = Fault("again", rank=0, place="forward", kind="request", step=8)
        job = pool_job(nodes=2, steps=12, faults=[CUT, again])
        first = job.hit("cut", cluster.cut_power)
        second = job.hit("again", cluster.cut_power)
        job.finish(undisturbed, recoveries=2)
        granted = [note["node"] for note in notes(job, "companion granted")]
        assert sorted(granted) == ["n3", "n4"] and first not in granted and second == granted[0]
        given_back = [(note["node"], note["reason"]) for note in notes(job, "companion given back")]
        assert given_back == [(granted[0], "no rank is on it"), (granted[1], "the job is over")]
    finally:
        cluster.run(["scontrol", "update", f"reservationname={POOL}", "nodes=n4"], check=False)


@pytest.mark.parametrize("how", ["scancel", "SIGTERM"])
def test_a_job_that_is_ended_gives_its_node_back(cluster: DevCluster, pool_job, how: str) -> None:
    job = pool_job(nodes=2, steps=50, faults=[CUT, STAND])
    job.hit("cut", cluster.cut_power)
    job.faults.await_armed("stand", 120)
    assert companions(cluster) == ["RUNNING n4"]
    if how == "scancel":
        cluster.run(["scancel", str(job.submitted.id)])
    else:
        (started,) = notes(job, "job started")
        cluster.run(["kill", "-TERM", str(started["pid"])], node=job.nodes[-1])
    assert_given_back(cluster)
    assert notes(job, "companion given back"), "it was we who did it"
