"""The commit decision as a table: what survivors say, where everybody resumes, who does what."""

from __future__ import annotations

import itertools

import pytest

from flashrec.core.commit import Impossible, decide
from flashrec.core.types import Plan, Report

ALL = (0, 1, 2, 3)
JOINER = Report(-1, -1, -1, False, ALL)


def said(v: int, voted: int, passed: int, *, valid: bool = True, replicas: tuple[int, ...] = ALL) -> Report:
    return Report(v, voted, passed, valid, replicas)


TABLE = [
    # what               survivors 0, 1, 2 (3 is a joiner)                              resume, forward, targets
    ("nobody voted", [said(7, 6, 6), said(7, 6, 6), said(7, 6, 6)], (7, (), {3})),
    ("some voted, nobody passed", [said(7, 7, 6), said(7, 6, 6), said(7, 7, 6)], (7, (), {3})),
    ("all voted, one passed", [said(7, 7, 6), said(7, 7, 7), said(7, 7, 6)], (8, (0, 1, 2), {3})),
    ("one has applied it", [said(7, 7, 6), said(8, 7, 7), said(7, 7, 6)], (8, (0, 2), {3})),
    ("one is in the next step", [said(8, 7, 7), said(8, 8, 7), said(7, 7, 7)], (8, (2,), {3})),
    ("a torn one is a target", [said(7, 7, 7, valid=False), said(7, 7, 6), said(7, 7, 6)], (7, (), {0, 3})),
    ("one that has no gradients is a target", [said(7, 6, 6), said(8, 7, 7), said(8, 7, 7)], (8, (), {0, 3})),
    ("one far behind is a target", [said(5, 5, 4), said(8, 7, 7), said(8, 7, 7)], (8, (), {0, 3})),
]


@pytest.mark.parametrize(("reports", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(reports: list[Report], expected: tuple[int, tuple[int, ...], set[int]]) -> None:
    plan = decide(2, dict(enumerate([*reports, JOINER])))
    assert isinstance(plan, Plan)
    assert (plan.resume_step, plan.roll_forward, set(plan.sources)) == expected
    assert set(plan.sources.values()).isdisjoint(plan.sources), "a target is no source"
    assert plan.reason


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_the_order_of_reports_has_no_effect(row) -> None:
    reports = [*enumerate(row[1]), (3, JOINER)]
    plans = {repr(decide(2, dict(order))) for order in itertools.permutations(reports)}
    assert len(plans) == 1


def test_who_moves_and_is_the_only_holder_gives_its_state_itself() -> None:
    alone = {rank: said(8, 7, 7, replicas=(rank,)) for rank in range(2)} | {2: Report(-1, -1, -1, False, (2,))}
    plan = decide(2, alone, {2: said(8, 7, 7, replicas=(2,))})
    assert isinstance(plan, Plan) and (plan.resume_step, plan.sources) == (8, {2: 2})
    behind = decide(2, alone, {2: said(7, 6, 6, replicas=(2,))})
    torn = decide(2, alone, {2: said(8, 7, 7, valid=False, replicas=(2,))})
    assert behind == torn == decide(2, alone) and isinstance(torn, Impossible)


def test_what_a_former_life_has_seen_counts() -> None:
    """All ranks of a job may move at once, and whoever moves may be the only one who saw a vote complete."""
    plan = decide(2, {0: JOINER, 1: JOINER}, {0: said(8, 7, 7), 1: said(8, 7, 7)})
    assert isinstance(plan, Plan) and (plan.resume_step, plan.sources) == (8, {0: 0, 1: 1})
    plan = decide(2, {0: said(7, 7, 6), 1: JOINER}, {1: said(8, 7, 7)})
    assert isinstance(plan, Plan) and (plan.resume_step, plan.roll_forward, plan.sources) == (8, (0,), {1: 0})


def test_sources_are_spread_and_prefer_those_that_are_already_there() -> None:
    reports = {0: said(7, 7, 6), 1: said(8, 7, 7), 2: said(8, 7, 7), 3: JOINER, 4: JOINER, 5: JOINER}
    reports = {r: Report(x.v, x.voted, x.passed, x.valid, tuple(range(6))) for r, x in reports.items()}
    plan = decide(2, reports)
    assert isinstance(plan, Plan)
    assert plan.sources == {3: 1, 4: 2, 5: 1}
    assert plan.stripes == {}, "those who roll forward are no further sources"


def test_who_is_left_without_work_sends_a_part_of_the_state() -> None:
    group = tuple(range(8))
    reports = {rank: said(8, 7, 7, replicas=group) for rank in range(5)} | {
        rank: Report(-1, -1, -1, False, group) for rank in (5, 6)
    }
    reports[7] = said(7, 7, 7, replicas=group)
    plan = decide(2, reports)
    assert isinstance(plan, Plan)
    assert plan.roll_forward == (7,)
    assert plan.sources == {5: 0, 6: 1}
    assert plan.stripes == {5: (2, 4), 6: (3,)}


def test_a_target_has_no_more_than_four_sources() -> None:
    reports = {rank: said(8, 7, 7, replicas=tuple(range(9))) for rank in range(8)}
    plan = decide(2, reports | {8: Report(-1, -1, -1, False, tuple(range(9)))})
    assert isinstance(plan, Plan) and plan.sources == {8: 0} and plan.stripes == {8: (1, 2, 3)}


def test_only_replicas_send_parts() -> None:
    reports = {rank: said(8, 7, 7, replicas=(rank % 2, rank % 2 + 2, rank % 2 + 4)) for rank in range(5)}
    plan = decide(2, reports | {5: Report(-1, -1, -1, False, (1, 3, 5))})
    assert isinstance(plan, Plan) and plan.sources == {5: 1} and plan.stripes == {5: (3,)}


def test_a_source_holds_the_same_shard() -> None:
    reports = {
        0: said(8, 7, 7, replicas=(0, 2)),
        1: said(8, 7, 7, replicas=(1, 3)),
        2: said(8, 7, 7, replicas=(0, 2)),
        3: Report(-1, -1, -1, False, ()),
    }
    plan = decide(2, reports)
    assert isinstance(plan, Plan)
    assert plan.sources == {3: 1}


def test_a_shard_without_a_holder_is_named() -> None:
    lost = Report(-1, -1, -1, False, (1, 3))
    reports = {0: said(8, 7, 7, replicas=(0, 2)), 1: lost, 2: said(8, 7, 7, replicas=(0, 2)), 3: lost}
    verdict = decide(2, reports)
    assert isinstance(verdict, Impossible)
    assert verdict.ranks == (1, 3)
    assert "1, 3" in verdict.reason


def test_no_valid_state_at_all() -> None:
    verdict = decide(2, {0: JOINER, 1: JOINER})
    assert isinstance(verdict, Impossible)
    assert verdict.ranks == (0, 1)
