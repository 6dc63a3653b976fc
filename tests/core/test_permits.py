"""Who may put a checkpoint in place: checkpoints only get newer, whatever a former life still does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashrec.core.permits import Permit, Permits

VALID_S = 5.0


class Rank0:
    """One rank with lives; `lose` gives it the next one."""

    def __init__(self) -> None:
        self.life = 1
        self.permits = Permits(VALID_S, lambda rank, life: (rank, life) == (0, self.life) or rank > 0)

    def ask(self, step: int, now: float, life: int | None = None) -> Permit:
        return self.permits.ask(0, life or self.life, step, now)

    def lose(self) -> None:
        self.life += 1


def test_newer_and_equal_steps_are_permitted_older_ones_are_not() -> None:
    rank = Rank0()
    assert rank.ask(100, 0.0).granted
    assert rank.ask(100, 1.0).granted, "the same again, or another rank's part of it"
    assert rank.permits.ask(3, 1, 100, 1.0).granted
    assert rank.ask(200, 2.0).granted
    assert rank.ask(199, 3.0) == Permit(False, "step 199 is older than 200, which was committed before")


def test_a_former_life_gets_nothing() -> None:
    rank = Rank0()
    rank.lose()
    assert rank.ask(100, 0.0, life=1) == Permit(False, "rank 0 has been replaced")
    assert rank.permits.newest == -1


def test_a_promise_is_kept_to_a_life_that_was_replaced() -> None:
    """It may be between the answer and its rename just now."""
    rank = Rank0()
    assert rank.ask(100, 10.0).granted
    rank.lose()
    refused = rank.ask(200, 12.0)
    assert not refused.granted and refused.retry_at == 15.0
    assert rank.ask(100, 12.0).granted, "the same step is the same checkpoint"
    assert rank.ask(200, 15.0).granted


def test_a_promise_to_a_living_rank_holds_up_nobody() -> None:
    rank = Rank0()
    assert rank.permits.ask(1, 1, 100, 0.0).granted
    assert rank.ask(200, 0.1).granted


@given(st.lists(st.tuples(st.sampled_from(["commit", "lose", "wait"]), st.integers(0, 3)), max_size=40))
def test_nothing_newer_is_permitted_while_a_former_life_may_use_its_permission(moves: list[tuple[str, int]]) -> None:
    rank, now, open_until = Rank0(), 0.0, dict[int, tuple[int, float]]()
    for move, by in moves:
        if move == "lose":
            rank.lose()
        elif move == "wait":
            now += by
        elif rank.ask(rank.permits.newest + by - 1, now).granted:
            newest = rank.permits.newest
            assert all(
                step == newest or until <= now for life, (step, until) in open_until.items() if life != rank.life
            )
            open_until[rank.life] = newest, now + VALID_S
