"""From a bad node to a drained one: the manager's report, `flashrec drain`, and root's epilog, on real Slurm."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault
from tests.e2e.support import FLASHREC
from tests.support.cluster import dev_cluster, new_name, wait_for
from tests.support.plugin import SOURCES, build_plugin

pytestmark = [pytest.mark.devcluster, pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    name = new_name()
    hooks = SOURCES / "hooks"
    with dev_cluster(
        name=name,
        num_nodes=3,
        slurmd_timeout_s=3600,
        plugstack=(f"optional {build_plugin()} drain=user",),
        extra_conf=(f"Prolog={hooks / 'flashrec-prolog'}", f"Epilog={hooks / 'flashrec-epilog'}", "PrologFlags=Alloc"),
    ) as cluster:
        yield cluster
        shutil.rmtree(f"/var/spool/flashrec/{name}", ignore_errors=True)


def reasons(cluster: DevCluster) -> dict[str, str]:
    lines = cluster.run(["sinfo", "-hN", "-o%N|%T|%E"]).stdout.splitlines()
    rows = [line.split("|", 2) for line in lines]
    return {node: reason for node, state, reason in rows if state.startswith("drain")}


def test_a_node_lost_by_silence_is_drained_when_the_job_has_ended(cluster: DevCluster, node_job) -> None:
    job = node_job(nodes=3, spares=1, steps=10, faults=[Fault("cut", 1, "backward", "request", step=4)])
    node = job.hit("cut", cluster.cut_power)
    job.finish(None)
    wait_for(lambda: node in reasons(cluster), f"{node} to be drained", 60)
    found = reasons(cluster)
    assert found[node].startswith(f"flashrec: job {job.submitted.id}: silent for ") and len(found) == 1
    cluster.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)


def test_the_user_has_a_node_replaced_and_drained(cluster: DevCluster, node_job) -> None:
    job = node_job(nodes=3, spares=1, steps=10, faults=[Fault("hold", 1, "forward", "request", step=4)])
    node = job.faults.await_armed("hold", 120).node
    argv = [*FLASHREC, "drain", str(job.job_dir), node, "XID 79\nNodeName=n9"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "epilog drains it" in done.stdout, done.stdout + done.stderr
    job.faults.mark_fired("hold", time.monotonic())
    job.finish(None)
    wait_for(lambda: node in reasons(cluster), f"{node} to be drained", 60)
    assert reasons(cluster) == {node: f"flashrec: job {job.submitted.id}: XID 79?NodeName=n9"}
    cluster.run(["scontrol", "update", f"nodename={node}", "state=resume"])


def test_an_idle_spare_goes_back_to_slurm_and_the_job_goes_on(cluster: DevCluster, node_job) -> None:
    job = node_job(nodes=3, spares=2, steps=10, faults=[Fault("hold", 0, "forward", "request", step=4)])
    busy = job.faults.await_armed("hold", 120).node
    batch_host = job.nodes[-1]
    (idle,) = set(job.nodes) - {busy, batch_host}

    def drop(node: str) -> subprocess.CompletedProcess[str]:
        return cluster.run([*FLASHREC, "drop", str(job.job_dir), node], check=False)

    assert "runs ranks" in drop(busy).stderr and "the manager runs on" in drop(batch_host).stderr
    done = drop(idle)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = cluster.run(["squeue", "-h", "-j", str(job.submitted.id), "-o", "%N"]).stdout.strip()
    left = cluster.run(["scontrol", "show", "hostnames", listed]).stdout.split()
    assert set(left) == {busy, batch_host}
    job.faults.mark_fired("hold", time.monotonic())
    job.finish(None)
    assert not job.journal.resumes(), "nothing was lost"
