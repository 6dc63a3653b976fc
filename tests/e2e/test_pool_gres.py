"""A companion job has what the job has on each of its nodes: GRES, CPUs, memory, time. Without torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing.jobs import FINAL_STATES, SubmittedJob
from tests.e2e.support import QUICK
from tests.support.cluster import dev_cluster, shared_folder, wait_for
from tests.support.people import unprivileged

pytestmark = [pytest.mark.devcluster, pytest.mark.timeout(200)]
GPU_NODE = "gpunode Gres=gpu:2"  # further settings of the node's line in slurm.conf
SCRIPT = """#!/bin/bash
{python} -m flashrec.cli.main run --pool flashspare --gpus-per-task=2 {options} -- sh -c '
echo "here: $SLURMD_NODENAME $SLURM_JOB_ID gpus $SLURM_GPUS_ON_NODE"; while [ ! -e {folder}/end ]; do sleep 0.1; done'
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """Node n2 is the pool; memory and GRES are counted, and nodes may be shared."""
    extra = ("GresTypes=gpu", "PartitionName=shared Nodes=ALL OverSubscribe=NO MaxTime=INFINITE State=UP")
    features = dict.fromkeys(("n0", "n1", "n2"), GPU_NODE)
    files = {"gres.conf": "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"}
    with dev_cluster(
        num_nodes=3, slurmd_timeout_s=3600, features=features, extra_conf=extra, conf_files=files
    ) as cluster:
        cluster.run(["scontrol", "create", "reservation", "reservationname=flashspare", "nodes=n2",
                     f"users={unprivileged().name}", "starttime=now", "duration=infinite"])  # fmt: skip
        yield cluster


def test_a_companion_job_is_like_a_node_of_the_job(cluster: DevCluster) -> None:
    person = unprivileged()
    with shared_folder() as folder:
        script = folder / "job.sh"
        script.write_text(SCRIPT.format(python=person.python, options=" ".join(QUICK), folder=folder))
        run = functools.partial(cluster.run, user=person.name)
        asked = ["--nodes=2", "--no-kill", "--partition=shared", "--gpus-per-node=2", "--cpus-per-task=3", "--time=30"]
        job = SubmittedJob(run, folder, [*asked, str(script)], person.env)
        try:
            check(cluster, job, folder)
        finally:
            cluster.run(["scancel", str(job.id)], check=False)
            cluster.heal("n1")
        wait_for(lambda: not cluster.run(["squeue", "--noheader", "--partition=shared"]).stdout.strip(), "the end", 60)


def check(cluster: DevCluster, job: SubmittedJob, folder: Path) -> None:
    wait_for(lambda: len(job.journal.events("WorkerStarted")) == 2 or job.state() in FINAL_STATES, "both ranks run", 60)
    assert job.state() not in FINAL_STATES, job.output.read_text()
    cluster.cut_power("n1")
    started = {2: "the rank on the node from the pool"}
    job.journal.wait_for(
        lambda: [x for x in job.journal.events("WorkerStarted") if x["incarnation"] in started], "it runs", 60
    )
    (granted,) = [line for line in job.journal.lines() if line.get("what") == "companion granted"]
    shown = cluster.run(["scontrol", "-o", "show", "job", str(granted["companion"])]).stdout
    facts = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    assert (facts["NodeList"], facts["Partition"], facts["NumCPUs"]) == ("n2", "shared", "3")
    assert "gres/gpu=2" in facts["TRES"] or facts["TresPerNode"].endswith("gpu:2")
    assert facts["TimeLimit"] in ("00:30:00", "00:29:00"), "what was left of the job's time"
    wait_for(lambda: f"here: n2 {granted['companion']} gpus 2" in job.output.read_text(), "the rank's word", 30)
    (folder / "end").touch()
    job.wait(60)
    assert job.exit_code() == 0, job.output.read_text()[-3000:]
