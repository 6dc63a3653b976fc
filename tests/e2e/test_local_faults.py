"""Kinds and places on real processes, without Slurm: a worker is killed or stopped at each place of a step, and
during an ongoing recovery. Every run is bit-identical to the undisturbed one, with at most one step redone.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from flashrec.testing import Fault
from tests.e2e.support import (
    assert_at_most_one_step_redone,
    assert_identical,
    assert_no_process,
    kill_node,
    report_of,
)

pytestmark = pytest.mark.torch
PLACES = ["forward", "backward", "before-vote", "in-optimizer", "after-optimizer"]


def assert_recovered(job, undisturbed, recoveries: int | None = None, steps: int = 10) -> None:
    assert job.wait() == 0, job.output()[-4000:]
    job.faults.assert_all_fired(job.plan)
    assert_identical(undisturbed(steps), job.out)
    assert_at_most_one_step_redone(job.job_dir, recoveries)


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_kind_at_each_place(kind: str, local_job, undisturbed) -> None:
    """One after another in one job, another rank each time."""
    faults = [Fault(place, index % 4, place, kind, step=2 + 2 * index) for index, place in enumerate(PLACES)]
    job = local_job(faults=faults, steps=13)
    assert_recovered(job, undisturbed, recoveries=len(PLACES), steps=13)
    ended = [e for e in job.journal.events("WorkerExited") if e["farewell"] != "finished"]
    assert [e["rank"] for e in ended] == [fault.rank for fault in faults]
    assert all(("stopped" in e["reason"]) == (kind == "SIGSTOP") for e in ended), "the verdict carries its reason"


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_replacement_hit_while_it_joins(kind: str, local_job, undisturbed) -> None:
    faults = [Fault("first", 2, "backward", "SIGKILL", step=4), Fault("second", 2, "join", kind, life=1)]
    job = local_job(faults=faults)
    assert_recovered(job, undisturbed, recoveries=1)
    assert max(e["incarnation"] for e in job.journal.events("WorkerStarted") if e["rank"] == 2) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_survivor_hit_during_a_recovery(number: signal.Signals, local_job, undisturbed) -> None:
    job = local_job(faults=[Fault("first", 2, "backward", "SIGKILL", step=4)])
    job.journal.wait_for(lambda: ("FENCING", "PLACING", 2) in job.journal.phases(), "the first recovery", 60)
    os.kill(job.worker_pid(1), number)
    hit_at = time.monotonic()
    assert_recovered(job, undisturbed, recoveries=1)
    ended = [e["rank"] for e in job.journal.events("WorkerExited") if e["mono"] >= hit_at]
    assert ended[:1] == [1], "the second fault fired"
    assert report_of(job.job_dir)["recoveries"][0]["generations"] == [2, 3]


def test_two_ranks_of_one_node_at_once_and_the_node_is_lost(local_job, undisturbed) -> None:
    """The agent of a node and its workers die together: the spare takes over."""
    job = local_job(faults=[Fault("wait", 2, "backward", "request", step=4)])
    job.faults.await_armed("wait", 60)
    pids = [job.worker_pid(2), job.worker_pid(3)]
    agent = job.agent_pid("local1")
    now = time.monotonic()
    kill_node(agent, pids)
    job.faults.mark_fired("wait", now)
    assert_recovered(job, undisturbed, recoveries=1)
    launched = report_of(job.job_dir)["recoveries"][0]["launched"]
    assert launched == ["ranks 2, 3 on local2"]


def test_workers_do_not_outlive_their_agent(local_job) -> None:
    """A worker whose agent is gone fences itself; a job whose manager is gone leaves nothing behind."""
    job = local_job(steps=100_000)
    job.journal.wait_for(lambda: ("RESTORING", "RUNNING", 1) in job.journal.phases(), "training", 60)
    os.kill(job.process.pid, signal.SIGKILL)
    assert_no_process(str(job.folder), timeout_s=20)
