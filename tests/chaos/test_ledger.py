"""The replica rule as chaos applies it: which refusals it predicts, and which plans it does not allow."""

from __future__ import annotations

import pytest

from flashrec.core.commit import Impossible
from flashrec.core.types import Plan, Report
from tests.chaos.ledger import Ledger, MirrorLedger

PAIRS = (frozenset({0, 2}), frozenset({1, 3}))
REFUSED = Impossible((1,), "no replica")
PLAN = Plan(2, 3, (), {1: 3}, "")


def reports(*invalid: int) -> dict[int, Report]:
    return {rank: Report(3, 2, 2, rank not in invalid, (rank % 2, rank % 2 + 2)) for rank in range(4)}


@pytest.mark.parametrize(
    ("lost", "is_predicted"), [((1,), False), ((0, 1), False), ((1, 2), False), ((1, 3), True), ((0, 1, 2), True)]
)
def test_a_refusal_is_right_when_a_whole_group_is_lost(lost: tuple[int, ...], is_predicted: bool) -> None:
    ledger = Ledger(PAIRS)
    for rank in lost:
        ledger.lose(rank, life=1)
    ledger.judge(reports(*lost), REFUSED)
    assert (ledger.refusals == ["lost"]) == is_predicted
    assert bool(ledger.problems) != is_predicted


def test_a_plan_without_a_replica_is_wrong() -> None:
    ledger = Ledger(PAIRS)
    ledger.lose(1, life=1)
    ledger.judge(reports(1), PLAN)
    assert not ledger.problems
    ledger.lose(3, life=1)
    ledger.judge(reports(1, 3), PLAN)
    assert "nobody of [1, 3] has a state" in ledger.problems[0]


def test_a_target_that_was_restored_holds_the_shard_again() -> None:
    ledger = Ledger(PAIRS)
    ledger.lose(1, life=1)
    ledger.begin_restore(1)
    ledger.restored(1, life=2)
    ledger.lose(3, life=1)
    ledger.judge(reports(3), REFUSED)
    assert ledger.problems, "rank 1 can restore rank 3"


def test_what_a_lost_life_says_comes_too_late() -> None:
    ledger = Ledger(PAIRS)
    ledger.lose(1, life=2)
    ledger.restored(1, life=2)
    assert ledger.without == {1}


def test_a_target_that_was_receiving_may_have_got_everything_or_not() -> None:
    ledger = Ledger(PAIRS)
    ledger.lose(1, life=1)
    ledger.begin_restore(1)
    ledger.lose(3, life=1)
    ledger.judge(reports(3), PLAN)
    ledger.judge(reports(1, 3), REFUSED)
    assert (ledger.problems, ledger.refusals) == ([], ["lost"])


def test_a_rank_that_knows_other_replicas_than_the_table_is_a_problem() -> None:
    ledger = Ledger(PAIRS)
    ledger.lose(1, life=1)
    ledger.judge(reports(1) | {2: Report(3, 2, 2, True, (2, 3))}, PLAN)
    assert ledger.problems == ["rank 2 says that its replicas are [2, 3]"]


def test_a_refusal_for_a_torn_state_is_told_apart() -> None:
    ledger = Ledger(PAIRS)
    ledger.lose(1, life=1)
    ledger.judge(reports(1, 3), REFUSED)
    assert (ledger.problems, ledger.refusals) == ([], ["torn"])


def test_a_mirrored_rank_is_restored_by_the_next_one_or_lost_with_it() -> None:
    def ledger(*lost: int) -> MirrorLedger:
        made = MirrorLedger([frozenset([rank]) for rank in range(3)])
        for rank in lost:
            made.lose(rank, 1)
        return made

    alone = {rank: Report(3, 2, 2, True, (rank,)) for rank in range(3)}
    right, wrong, both = ledger(1), ledger(1), ledger(1, 2)
    right.judge(alone, Plan(2, 3, (), {1: 2}, "", mirrored=(1,)))
    wrong.judge(alone, Plan(2, 3, (), {1: 0}, "", mirrored=(1,)))
    wrong.judge(alone, Plan(2, 3, (), {1: 2}, ""))
    wrong.judge(alone, Impossible((1,), ""))
    both.judge(alone, Impossible((1,), ""))
    assert not right.problems and len(wrong.problems) == 3
    assert not both.problems and both.refusals == ["lost"]
    both.judge(alone, Plan(2, 3, (), {1: 2, 2: 0}, "", mirrored=(1, 2)))
    assert len(both.problems) == 1
