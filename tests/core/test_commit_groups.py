"""The commit decision when ranks hold different shards: HSDP x TP over (2 replicas, 2 shards, 2 tensor parallel)."""

from __future__ import annotations

import itertools

import pytest

from flashrec.core.commit import Impossible, decide
from flashrec.core.types import Plan, Report

RANKS = range(8)


def partner(rank: int) -> int:
    """Ranks that differ in the first mesh dimension only hold the same shard."""
    return rank ^ 4


def said(rank: int, v: int, voted: int, passed: int, *, valid: bool = True) -> Report:
    return Report(v, voted, passed, valid, (min(rank, partner(rank)), max(rank, partner(rank))))


def joiner(rank: int) -> Report:
    return said(rank, -1, -1, -1, valid=False)


def reports(lost: tuple[int, ...], ahead: tuple[int, ...] = (), applied: tuple[int, ...] = ()) -> dict[int, Report]:
    """All have voted for step 7; `ahead` have seen that vote complete, `applied` have done the step, too."""
    found = {}
    for rank in RANKS:
        if rank in lost:
            found[rank] = joiner(rank)
        elif rank in applied:
            found[rank] = said(rank, 8, 7, 7)
        else:
            found[rank] = said(rank, 7, 7, 7 if rank in ahead else 6)
    return found


LOST = [lost for size in (1, 2, 3, 4) for lost in itertools.combinations(RANKS, size)]


@pytest.mark.parametrize(
    ("ahead", "applied", "resume"),
    [((), (), 7), ((3,), (), 8), ((), (6,), 8), ((1, 2), (0, 5), 8)],
    ids=["nobody saw the vote", "one saw it", "one has applied it", "some of each"],
)
def test_each_shard_comes_from_its_own_replica(ahead: tuple[int, ...], applied: tuple[int, ...], resume: int) -> None:
    for lost in LOST:
        if not {*ahead, *applied} - set(lost):
            resume_now = 7  # those who knew are gone: the step is done again by all
        else:
            resume_now = resume
        verdict = decide(2, reports(lost, ahead, applied))
        gone = tuple(rank for rank in lost if partner(rank) in lost)
        if gone:
            assert isinstance(verdict, Impossible) and verdict.ranks == gone, lost
            continue
        assert isinstance(verdict, Plan), lost
        assert verdict.resume_step == resume_now, lost
        assert verdict.sources == {rank: partner(rank) for rank in lost}, lost
        survivors = set(RANKS) - set(lost)
        assert set(verdict.roll_forward) == (survivors - set(applied) if resume_now == 8 else set()), lost


def test_one_shard_that_is_applied_takes_all_others_along() -> None:
    """Without a vote this could not be repaired: shard 1 only exists after the step, shard 0 only before it."""
    told = reports((0,), applied=(1, 3, 5, 7))
    verdict = decide(2, told)
    assert isinstance(verdict, Plan)
    assert (verdict.resume_step, verdict.roll_forward, verdict.sources) == (8, (2, 4, 6), {0: 4})


def test_a_torn_rank_is_restored_by_its_replica_or_not_at_all() -> None:
    torn = reports(()) | {2: said(2, 7, 7, 7, valid=False)}
    assert decide(2, torn).sources == {2: 6}  # type: ignore[union-attr]
    verdict = decide(2, torn | {6: joiner(6)})
    assert isinstance(verdict, Impossible) and verdict.ranks == (2, 6)
