"""Sets of ranks: few bytes for many, and the same set in whatever form."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.core.ranks import FEW, MAX_RANKS, RankSet, compact, in_words


@given(st.lists(st.integers(0, 300), max_size=80), st.integers(-1, 301))
def test_it_is_the_same_set(ranks: list[int], other: int) -> None:
    said = compact(tuple(ranks))
    assert set(said) == set(ranks)
    assert (other in said) is (other in ranks)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=RankSet)
    assert again == said and hash(again) == hash(said)


@given(st.sets(st.integers(0, 300), min_size=FEW + 1), st.randoms())
def test_equal_sets_are_equal(ranks: set[int], random) -> None:
    order = list(ranks)
    random.shuffle(order)
    said = compact(tuple(order))
    assert said == compact(tuple(sorted(ranks)))
    assert list(said) == sorted(ranks) and len(said) == len(ranks)


@pytest.mark.parametrize("step", [1, 8])
def test_many_evenly_spaced_ranks_cost_few_bytes(step: int) -> None:
    said = compact(tuple(range(3, 80_000, step)))
    assert len(msgspec.msgpack.encode(said)) < 30
    assert len(list(said)) == len(said) == len(range(3, 80_000, step))


def test_a_few_are_listed() -> None:
    assert compact((4, 4)) == (4, 4)
    assert compact(tuple(range(FEW))) == tuple(range(FEW))


@pytest.mark.parametrize("run", [(0, MAX_RANKS + 1, 1), (0, 0, 1), (0, 2, 0), (-1, 2, 1)])
def test_no_peer_makes_us_go_through_sets_that_are_none(run: tuple[int, int, int]) -> None:
    data = msgspec.msgpack.encode({"runs": [run]})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=RankSet)


def test_in_words() -> None:
    assert in_words([3, 1]) == "3, 1"
    assert in_words(range(FEW)).endswith(f", {FEW - 1}")
    assert in_words(range(1000)) == "0, 1, 2, 3, 4, 5, 6, 7 and 992 more"
