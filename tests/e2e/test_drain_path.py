"""From a bad node to a drained one: the manager's report, `flashrec drain`, and root's epilog, on real Slurm."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault
from tests.e2e.cluster_job import NodeJob
from tests.e2e.support import (
    FLASHREC,
    assert_identical,
    assert_no_step_redone,
    boundary_fences,
    processes_with,
    resume_step,
)  # fmt: skip
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


def states(cluster: DevCluster) -> dict[str, str]:
    return dict(line.split("|") for line in cluster.run(["sinfo", "-hN", "-o%N|%T"]).stdout.split())


def ours_on(node: str, job: NodeJob) -> dict[int, str]:
    """Processes of the job on one node."""
    found = {}
    for pid, line in processes_with("flashrec").items() | processes_with(str(job.out)).items():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={job.submitted.id}".encode()} <= set(environ):
            found[pid] = line
    return found


def test_a_draining_node_leaves_at_a_step_boundary(cluster: DevCluster, node_job, undisturbed_job) -> None:
    """Slurm's DRAIN of a node in use costs no step, and the job is never killed for it."""
    calm = undisturbed_job(2, 10)
    settings = ("detection.slurm_poll_interval_s=0.5",)
    faults = [Fault("hold", 1, "forward", "request", step=4)]
    job = node_job(nodes=3, spares=1, steps=10, faults=faults, settings=settings)
    node = job.faults.await_armed("hold", 120).node
    assert ours_on(node, job), "its agent and its worker"
    cluster.run(["scontrol", "update", f"nodename={node}", "state=drain", "reason=fan 3"])
    job.journal.wait_for(lambda: boundary_fences(job.journal), "a fence at a step boundary", 120)
    assert job.submitted.state() == "RUNNING"
    job.faults.mark_fired("hold", time.monotonic())
    wait_for(lambda: not ours_on(node, job), f"{node} to be left alone", 60)
    job.finish(None)
    assert_identical(calm, job.out)
    assert_no_step_redone(job.job_dir, 1)
    assert resume_step(job.job_dir) == 5, "the pause comes at the end of the step in which it was asked for"
    pause = next(line["mono"] for line in job.journal.lines() if line["kind"] == "phase" and line["to"] == "FENCING")
    (successor,) = [e for e in job.journal.events("WorkerJoined") if e["incarnation"] == 2]
    assert successor["rank"] == 1 and successor["mono"] < pause, "the spare joined before the pause"
    assert not job.journal.events("NodeCondemned")
    wait_for(lambda: states(cluster)[node] == "drained", f"{node} to be drained", 60)
    assert reasons(cluster) == {node: "fan 3"}, "Slurm's word was not touched"
    cluster.run(["scontrol", "update", f"nodename={node}", "state=resume"])


def test_the_user_has_a_node_replaced_and_drained(cluster: DevCluster, node_job) -> None:
    job = node_job(nodes=3, spares=1, steps=10, faults=[Fault("hold", 1, "forward", "request", step=4)])
    node = job.faults.await_armed("hold", 120).node
    argv = [*FLASHREC, "drain", str(job.job_dir), node, "XID 79\nNodeName=n9"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "epilog drains it" in done.stdout, done.stdout + done.stderr
    job.journal.wait_for(lambda: boundary_fences(job.journal), "a fence at a step boundary", 120)
    job.faults.mark_fired("hold", time.monotonic())
    job.finish(None)
    wait_for(lambda: node in reasons(cluster), f"{node} to be drained", 60)
    assert_no_step_redone(job.job_dir, 1)
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
