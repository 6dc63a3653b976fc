"""Hangs in a whole job on real processes: each is found, shown and replaced, and the numbers are those of an
undisturbed run. What only looks like a hang is left alone.
"""

from __future__ import annotations

import pytest

from flashrec.testing import Fault
from tests.e2e.support import assert_at_most_one_step_redone, assert_identical

pytestmark = pytest.mark.torch
STEPS = 100


def test_a_hang_and_a_held_lock_are_found_shown_and_replaced(local_job, undisturbed) -> None:
    faults = [
        Fault("hang", rank=1, place="forward", kind="hang", step=60),
        Fault("lock", rank=2, place="before-vote", kind="gil", step=85),
    ]
    job = local_job(faults=faults, steps=STEPS, settings=["hangs.first_step_s=20"])
    assert job.wait(240) == 0, job.output()[-4000:]
    job.faults.assert_all_fired(job.plan)
    assert_identical(undisturbed(STEPS), job.out)
    assert_at_most_one_step_redone(job.job_dir, recoveries=2)

    notes = [line for line in job.journal.lines() if line.get("what") == "worker hangs"]
    assert [(note["rank"], note["killed"]) for note in notes] == [(1, True), (2, True)]
    for note in notes:
        assert note["how"] == "py-spy", note
        assert "stand_still" in note["stacks"] and "train.py" in note["stacks"]
    assert "in step 60" in notes[0]["reason"] and "says nothing" in notes[1]["reason"]
    ended = [e for e in job.journal.events("WorkerExited") if e["farewell"] != "finished"]
    assert [e["rank"] for e in ended] == [1, 2]
    assert all("hangs in step" in e["reason"] and "stand_still" in e["reason"] for e in ended)
    assert "rank 1 hangs in step 60 for" in job.output() and "; killed" in job.output()
