"""What `flashrec pool sync` decides to do."""

from __future__ import annotations

import pytest

from flashrec.admin.pool import (
    Action,
    CancelJob,
    Complain,
    CreatePool,
    DeletePool,
    ExtendPool,
    PoolConfig,
    PoolFacts,
    SetNodes,
    plan_sync,
)
from tests.admin.pool_facts import NOW, YEAR, facts, job, node, reservation

CONFIG = PoolConfig()


def plan(known: PoolFacts, **config: object) -> list[Action]:
    return plan_sync(PoolConfig(**config), known, NOW)  # type: ignore[arg-type]


def new_nodes(actions: list[Action]) -> tuple[str, ...] | None:
    found = [a.nodes for a in actions if isinstance(a, CreatePool | SetNodes)]
    assert len(found) < 2
    return found[0] if found else None


def test_the_pool_is_made_of_the_nodes_with_the_feature() -> None:
    known = facts([node("n1"), node("n2"), node("n3", features="gpu"), node("n4", features="")])
    (action,) = plan(known)
    assert isinstance(action, CreatePool) and action.nodes == ("n1", "n2")


def test_nothing_to_do_says_nothing() -> None:
    assert plan(facts([node("n1"), node("n2")], reservation("n1", "n2"))) == []


@pytest.mark.parametrize("states", [("DOWN",), ("DOWN", "NOT_RESPONDING"), ("IDLE", "DRAIN"), ("FAIL",), ("FUTURE",)])
def test_a_lost_node_is_replaced_by_another_one_with_the_feature(states: tuple[str, ...]) -> None:
    known = facts([node("n1", *states), node("n2"), node("n3")], reservation("n1", "n2"))
    (action,) = plan(known, size=2)
    assert isinstance(action, SetNodes) and action.nodes == ("n2", "n3")
    assert "-n1" in action.reason and states[0] in action.reason and "+n3" in action.reason


def test_a_member_that_does_not_answer_stays_but_is_not_taken_in() -> None:
    silent = node("n1", "IDLE", "NOT_RESPONDING")
    assert plan(facts([silent, node("n2")], reservation("n1")), size=1) == []
    assert new_nodes(plan(facts([silent, node("n2")]), size=1)) == ("n2",)


def test_substitutes_stand_in_only_while_needed() -> None:
    others = [node("s1", features="gpu"), node("s2", "ALLOCATED", features="gpu", busy=8)]
    lost = facts([node("n1", "DOWN"), node("n2"), *others], reservation("n1", "n2"))
    assert new_nodes(plan(lost, substitutes="gpu")) == ("n2", "s1")
    assert new_nodes(plan(lost, substitutes="gpu", size=3)) == ("n2", "s1"), "an idle one, never a busy one"
    back = facts([node("n1"), node("n2"), *others], reservation("n2", "s1"))
    assert new_nodes(plan(back, substitutes="gpu")) == ("n1", "n2")


def test_a_substitute_that_serves_a_job_stays_until_it_is_idle() -> None:
    busy = node("s1", "ALLOCATED", features="gpu", busy=8)
    known = facts([node("n1"), node("n2", "DOWN"), busy], reservation("s1"))
    assert new_nodes(plan(known, size=2)) == ("n1", "s1")


def test_without_substitutes_too_few_is_a_complaint() -> None:
    known = facts([node("n1", "DOWN"), node("n2")], reservation("n1", "n2"))
    complaint, action = plan(known)
    assert isinstance(complaint, Complain) and "1 usable nodes for a pool of 2" in complaint.reason
    assert isinstance(action, SetNodes) and action.nodes == ("n2",)


def test_the_pool_is_never_emptied() -> None:
    known = facts([node("n1", "DOWN"), node("n2", "DOWN")], reservation("n1", "n2"))
    (complaint,) = plan(known)
    assert isinstance(complaint, Complain) and "0 usable" in complaint.reason


def test_no_pool_without_nodes() -> None:
    assert [type(a) for a in plan(facts([node("n1", features="")]), size=1)] == [Complain]
    assert plan(facts([node("n1", features="")])) == []


def test_size_takes_and_gives_back() -> None:
    nodes = [node("n1"), node("n2", "ALLOCATED", busy=8), node("n3")]
    assert new_nodes(plan(facts(nodes), size=2)) == ("n1", "n3"), "idle ones first"
    assert new_nodes(plan(facts(nodes, reservation("n1", "n3")), size=3)) == ("n1", "n2", "n3")
    assert new_nodes(plan(facts(nodes, reservation("n1", "n2", "n3")), size=2)) == ("n1", "n2")


def test_nodes_of_other_reservations_are_left_alone() -> None:
    known = facts([node("n1"), node("n2")], reservation("n1", name="maintenance"))
    assert new_nodes(plan(known, size=1)) == ("n2",)


def test_a_member_without_the_feature_leaves() -> None:
    known = facts([node("n1"), node("n2", features="")], reservation("n1", "n2"))
    assert new_nodes(plan(known)) == ("n1",)


def test_daemon_is_the_user_who_is_left_out() -> None:
    assert plan(facts([node("n1")], reservation("n1", users=("daemon",)))) == [], "as some releases show -daemon"


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": frozenset({"IGNORE_JOBS", "REPLACE_DOWN"})},
        {"flags": frozenset({"IGNORE_JOBS", "SPEC_NODES", "MAGNETIC"})},
        {"flags": frozenset({"SPEC_NODES"})},
        {"accounts": ("phys",)},
        {"users": ("alice",)},
    ],
)
def test_a_reservation_of_another_kind_is_made_anew_unless_it_is_used(changes: dict[str, object]) -> None:
    held = reservation("n1", **changes)
    assert [type(a) for a in plan(facts([node("n1")], held))] == [DeletePool, CreatePool]
    used = facts([node("n1")], held, jobs=[job(1, reservation="flashspare")])
    assert [type(a) for a in plan(used)] == [Complain]


def test_the_reservation_is_renewed_before_slurms_year_is_over() -> None:
    started = NOW - 330 * 86400
    (action,) = plan(facts([node("n1")], reservation("n1", start_time=started, end_time=started + YEAR)))
    assert isinstance(action, ExtendPool)
    assert started + action.minutes * 60 == NOW + YEAR


# ---- companion jobs


def test_companion_jobs_of_ended_jobs_are_cancelled() -> None:
    jobs = [job(1), job(2, admin="flashrec:spare-for=1"), job(3, admin="flashrec:spare-for=9")]
    (action,) = plan(facts([node("n1")], reservation("n1"), jobs=jobs))
    assert action == CancelJob(3, "companion job of job 9, which has ended")


def test_a_number_that_now_belongs_to_somebody_else_is_not_the_job() -> None:
    jobs = [job(1, user=2000), job(2, admin="flashrec:spare-for=1", user=1000)]
    (action,) = plan(facts([node("n1")], reservation("n1"), jobs=jobs))
    assert isinstance(action, CancelJob) and action.job_id == 2


def test_a_finished_job_that_slurm_still_remembers_has_ended() -> None:
    jobs = [job(1, state="COMPLETED"), job(2, admin="flashrec:spare-for=1"), job(3, admin="flashrec:spare-for=1",
            state="CANCELLED")]  # fmt: skip
    assert [a for a in plan(facts([node("n1")], reservation("n1"), jobs=jobs)) if isinstance(a, CancelJob)] == [
        CancelJob(2, "companion job of job 1, which has ended")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "flashrec:spare-for=9\nflashrec:spare-for=9", " flashrec:spare-for=9", "flashrec:spare-for=9\n",
        "flashrec:spare-for=", "flashrec:spare-for=٩", "spare", "flashrec:spare-for=99999999999",
    ],
)  # fmt: skip
def test_what_users_can_write_cancels_nothing(text: str) -> None:
    forged = [
        job(2, name=text, comment=text),
        job(3, name="flashrec-spare-9", comment="flashrec:spare-for=9", reservation="flashspare"),
        job(4, admin=text),
    ]
    assert plan(facts([node("n1")], reservation("n1"), jobs=forged)) == []
