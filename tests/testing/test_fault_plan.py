"""A plan that cannot work is refused with a sentence, before anything starts."""

import json

import pytest

from flashrec.testing import Fault, FaultPlan, PlanError, load_plan

GOOD = Fault("a", rank=1, step=3, place="backward", kind="SIGKILL")


def test_plan_survives_the_file(tmp_path):
    plan = FaultPlan(str(tmp_path), (GOOD, Fault("b", rank=0, place="join", kind="exit", life=2)), timeout_s=5)
    path = tmp_path / "plan.json"
    path.write_text(
        json.dumps(
            {
                "directory": str(tmp_path),
                "timeout_s": 5,
                "faults": [
                    {"id": "a", "rank": 1, "step": 3, "place": "backward", "kind": "SIGKILL"},
                    {"id": "b", "rank": 0, "place": "join", "kind": "exit", "life": 2},
                ],
            }
        )
    )
    assert load_plan(path) == plan


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (Fault("a/b", rank=0, step=1, place="forward", kind="exit"), "file name"),
        (Fault("a", rank=0, step=1, place="lunch", kind="exit"), "place 'lunch'"),
        (Fault("a", rank=0, step=1, place="forward", kind="tickle"), "kind 'tickle'"),
        (Fault("a", rank=-1, step=1, place="forward", kind="exit"), "negative"),
        (Fault("a", rank=0, place="forward", kind="exit"), "needs a step"),
        (Fault("a", rank=0, step=-1, place="forward", kind="exit"), "needs a step"),
        (Fault("a", rank=0, step=1, place="join", kind="exit"), "takes no step"),
        (Fault("a", rank=0, place="join", kind="exit", life=0), "life starts at 1"),
        (Fault("a", rank=0, step=1, place="forward", kind="exit", holder=1), "only for place 'in-collective'"),
        (Fault("a", rank=0, step=1, place="in-collective", kind="SIGKILL"), "needs a holder"),
        (Fault("a", rank=0, step=1, place="in-collective", kind="SIGKILL", holder=0), "another rank"),
        (Fault("a", rank=0, step=1, place="in-collective", kind="raise", holder=1), "cannot raise"),
        (Fault("a", rank=0, step=1, place="in-collective", kind="hang", holder=1), "stands still already"),
    ],
)
def test_fault_that_cannot_work_is_refused(fault, complaint):
    with pytest.raises(PlanError, match=complaint):
        FaultPlan("/shared", (fault,)).check()


def test_two_faults_with_one_id_are_refused():
    with pytest.raises(PlanError, match="two faults"):
        FaultPlan("/shared", (GOOD, GOOD)).check()


def test_directory_must_be_absolute():
    with pytest.raises(PlanError, match="absolute"):
        FaultPlan("shared", (GOOD,)).check()


def test_no_time_to_wait_is_refused():
    with pytest.raises(PlanError, match="timeout_s"):
        FaultPlan("/shared", (GOOD,), timeout_s=0).check()


def test_unknown_key_is_refused_and_names_the_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(
        '{"directory": "/d", "faults": [{"id": "a", "rank": 0, "stepp": 1, "place": "join", "kind": "exit"}]}'
    )
    with pytest.raises(PlanError, match=r"plan\.json.*stepp"):
        load_plan(path)


def test_missing_file_is_named():
    with pytest.raises(PlanError, match="cannot read /nowhere"):
        load_plan("/nowhere")
