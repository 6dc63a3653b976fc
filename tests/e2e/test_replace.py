"""`flashrec replace` on a running job: the ranks move, the numbers stay, and the node is not used again."""

from __future__ import annotations

import subprocess
import time

import pytest

from flashrec.testing import Fault
from tests.e2e.support import (
    FLASHREC,
    LocalJob,
    assert_at_most_one_step_redone,
    assert_identical,
    assert_no_step_redone,
    boundary_fences,
    resume_step,
)  # fmt: skip

pytestmark = pytest.mark.torch


SETTINGS = ["recovery.agent_retry_s=0.2", "hangs.kill=false"]  # a victim stands still until the test lets it go on


def replace(job: LocalJob, node: str) -> subprocess.CompletedProcess[str]:
    return verb(job, "replace", node, "--reason", "it is slow")


def verb(job: LocalJob, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [*FLASHREC, words[0], str(job.job_dir), *words[1:]]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def await_boundary_fence(job: LocalJob) -> None:
    """The successors are ready, and all ranks have been asked to pause at the end of a step."""
    job.journal.wait_for(lambda: boundary_fences(job.journal), "a fence at a step boundary", 120)


def test_a_node_is_replaced_at_a_step_boundary(local_job, undisturbed) -> None:
    job = local_job(faults=[Fault("hold", 0, "forward", "request", step=4)], settings=SETTINGS)
    armed = job.faults.await_armed("hold", 120)
    done = replace(job, armed.node)
    assert done.returncode == 0 and "leaves at a step boundary" in done.stdout, done.stderr
    await_boundary_fence(job)
    job.faults.mark_fired("hold", time.monotonic())
    assert job.wait() == 0, job.output()[-4000:]
    assert_identical(undisturbed(10), job.out)
    assert_no_step_redone(job.job_dir, 1)
    assert resume_step(job.job_dir) == 5, "the pause comes at the end of the step in which it was asked for"
    (left,) = job.journal.events("NodeLeaving")
    assert left["node"] == armed.node and left["reason"] == "replace asked for: it is slow"
    assert not job.journal.events("NodeCondemned")
    assert f"node {armed.node} is not used any more" in job.output()
    joined = [e["node"] for e in job.journal.events("AgentJoined")]
    assert joined.count(armed.node) == 1, "it came back"


def test_a_node_is_replaced_now(local_job, undisturbed) -> None:
    job = local_job(faults=[Fault("hold", 0, "forward", "request", step=4)], settings=SETTINGS)
    armed = job.faults.await_armed("hold", 120)
    done = verb(job, "replace", armed.node, "--now")
    assert done.returncode == 0 and "is being replaced" in done.stdout, done.stderr
    again = replace(job, armed.node)
    assert again.returncode == 1 and "runs nothing of this job" in again.stderr
    job.faults.mark_fired("hold", time.monotonic())
    assert job.wait() == 0, job.output()[-4000:]
    assert_identical(undisturbed(10), job.out)
    assert_at_most_one_step_redone(job.job_dir, 1)
    (lost,) = job.journal.events("NodeCondemned")
    assert lost["node"] == armed.node and lost["reason"] == "replace asked for"
    joined = [e["node"] for e in job.journal.events("AgentJoined")]
    assert joined.count(armed.node) == 1, "it came back"


def test_without_a_spare_nothing_is_given_up(local_job) -> None:
    job = local_job(faults=[Fault("hold", 0, "forward", "request", step=4)], nodes=2, spares=0)
    armed = job.faults.await_armed("hold", 120)
    done = replace(job, armed.node)
    job.faults.mark_fired("hold", time.monotonic())
    assert done.returncode == 1 and "no spare is free" in done.stderr
    assert job.wait() == 0, job.output()[-4000:]
    assert not job.journal.events("NodeCondemned") and not job.journal.events("NodeLeaving")


def test_an_idle_spare_is_dropped_and_a_busy_node_is_not(local_job) -> None:
    job = local_job(faults=[Fault("hold", 0, "forward", "request", step=4)], settings=SETTINGS)
    armed = job.faults.await_armed("hold", 120)
    busy, idle, unknown = (verb(job, "drop", node) for node in (armed.node, "local2", "local9"))
    job.faults.mark_fired("hold", time.monotonic())
    assert busy.returncode == 1 and "runs ranks" in busy.stderr
    assert idle.returncode == 0 and "not used by this job any more" in idle.stdout
    assert unknown.returncode == 1 and "not part of this job" in unknown.stderr
    assert job.wait() == 0, job.output()[-4000:]
    assert [e["node"] for e in job.journal.events("AgentJoined")].count("local2") == 1, "it came back"
    assert not any("FENCING" in phase for phase in job.journal.phases())


def test_who_is_to_be_asked_must_be_known(tmp_path) -> None:
    argv = [*FLASHREC, "replace", "4711", "n1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 1 and "no job directory of 4711 here" in done.stderr
