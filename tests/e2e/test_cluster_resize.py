"""On a real Slurm cluster: the power of a node is cut and there is no spare. The job goes on with the others, and grows
when the node is back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault
from tests.e2e.resizes import RESIZER, assert_each_sample_once_an_epoch, numbers, said
from tests.e2e.support import report_of
from tests.support.cluster import dev_cluster

pytestmark = [pytest.mark.devcluster, pytest.mark.torch, pytest.mark.timeout(900)]
STEPS, LOST_IN = 160, 5
PATIENT = ("detection.worker_silent_s=300",)  # interpreters of a busy machine say nothing while they end
SETTINGS = ("recovery.shrink=replica_groups", "recovery.spare_wait_s=0.5", "recovery.resize_interval_s=1", *PATIENT)


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with dev_cluster(num_nodes=3, slurmd_timeout_s=3600) as cluster:
        yield cluster


def test_a_job_goes_on_without_a_node_until_it_is_back(cluster: DevCluster, node_job) -> None:
    def start(steps: int, nodes: int, kept: str, **more: object):
        train = f"{RESIZER} --kept {kept} --slow 0.5 --full 3"
        return node_job(nodes=nodes, spares=0, steps=steps, train=train, **more)

    fault = Fault("lost", 1, "backward", "request", step=LOST_IN)
    job = start(STEPS, 3, "kept", faults=[fault], settings=SETTINGS)
    node = job.hit("lost", cluster.cut_power)
    assert node != job.nodes[-1], "the batch host is not the victim"
    job.journal.wait_for(lambda: job.journal.resumes() >= 1, "a smaller world", 120)
    assert job.journal.events("WorkerRestored")[-1]["rank"] in (0, 1)
    cluster.heal(node)
    job.journal.wait_for(lambda: job.journal.resumes() >= 2, "the former size", 200)
    job.finish(None)

    shrunk, grown = report_of(job.job_dir)["recoveries"]
    assert [rung["rung"] for recovery in (shrunk, grown) for rung in recovery["rungs"]] == ["shrink", "grow"]
    assert (shrunk["resume_step"], shrunk["steps_redone"], grown["steps_redone"]) == (LOST_IN, 1, 0)
    assert "silent for" in shrunk["reasons"][0] and shrunk["durations"]["hand_over"] > 0
    again = grown["resume_step"]
    lines, resizes = said(job.out)
    assert {step for (step, _), found in lines.items() if found["world"] == 2} == set(range(LOST_IN, again))
    assert [found["resized"] for _, found in sorted(resizes.items())] == [[3, 2]] * 2 + [[2, 3]] * 3
    assert_each_sample_once_an_epoch(lines, STEPS)
    for nodes, first, last in ((2, LOST_IN, again), (3, again, STEPS)):
        kept = job.folder / f"kept-{nodes}"
        shutil.copytree(job.folder / f"kept/step-{first:08d}", kept / f"step-{first:08d}")
        alone = start(last, nodes, str(kept), settings=PATIENT)
        alone.finish(None)
        wanted = numbers(said(alone.out)[0], first, last)
        assert wanted and wanted == numbers(lines, first, last), f"the world of {nodes}"
