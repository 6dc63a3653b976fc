"""Sets of ranks as they are said: a few are listed, many are said as runs, so that their number costs no bytes.

A replica group, or the members of a process group, of a large job has thousands of ranks, every rank speaks of its own,
and nearly always they are evenly spaced: (first, how many, step).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Union

import msgspec

FEW = 16  # so many are listed
MAX_RANKS = 2**24  # in one set: more than any job has, few enough to be gone through


class Ranks(msgspec.Struct, frozen=True, gc=False):
    """Many ranks. runs: (first, how many, step) of each run, in ascending order."""

    runs: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        """Raises ValueError for what no `compact` has made (msgspec makes an error of the peer of it)."""
        num_ranks = 0
        for first, number, step in self.runs:
            if first < 0 or number < 1 or step < 1:
                raise ValueError("a run of ranks that is none")
            num_ranks += number
        if num_ranks > MAX_RANKS:
            raise ValueError(f"more than {MAX_RANKS} ranks")

    def __contains__(self, rank: object) -> bool:
        return any(rank in run for run in self._ranges())

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._ranges())

    def __len__(self) -> int:
        return sum(number for _, number, _ in self.runs)

    def _ranges(self) -> Iterator[range]:
        return (range(first, first + number * step, step) for first, number, step in self.runs)


RankSet = Union[tuple[int, ...], Ranks]


@lru_cache(maxsize=256)
def compact(ranks: tuple[int, ...]) -> RankSet:
    """The same set, in few bytes."""
    if len(ranks) <= FEW:
        return ranks
    return Ranks(tuple(_runs(sorted(set(ranks)))))


def _runs(ranks: list[int]) -> Iterator[tuple[int, int, int]]:
    start = 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 1
        end = start + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        yield ranks[start], end - start, step
        start = end


def in_words(ranks: Iterable[int]) -> str:
    """For people: '1, 2, 5', or the first ones and how many more."""
    listed = list(ranks)
    if len(listed) <= FEW:
        return ", ".join(map(str, listed))
    return f"{', '.join(map(str, listed[: FEW // 2]))} and {len(listed) - FEW // 2} more"
