"""Stragglers: who waits least while the others wait for it; said when it changes, not every second."""

from __future__ import annotations

import random

import pytest

from flashrec.core.limits import HangLimits
from flashrec.core.stragglers import Stragglers

LIMITS = HangLimits()


class Pace:
    """Ranks that compute for so many seconds a step, and are looked at four times a second."""

    def __init__(self, *busy_s: float) -> None:
        self.busy_s, self.now, self.random = list(busy_s), 0.0, random.Random(1)
        self.watch = Stragglers(LIMITS)
        self.found: list[tuple[float, int, bool]] = []
        self.watch.tick(self.now)

    def train(self, seconds: float) -> list[tuple[int, bool]]:
        """Verdicts of this stretch."""
        before = len(self.found)
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            step_s = max(self.busy_s)
            for rank, busy_s in enumerate(self.busy_s):
                self.watch.seen(rank, 1, waiting=self.random.random() * step_s > busy_s)
            self.found += [(self.now, it.rank, it.is_slow) for it in self.watch.tick(self.now)]
        return [(rank, is_slow) for _, rank, is_slow in self.found[before:]]


def test_half_as_long_again_is_a_straggler_and_is_told_once() -> None:
    pace = Pace(1.0, 1.0, 1.5, 1.0)
    assert pace.train(600) == [(2, True)]
    assert pace.found[0][0] <= 2 * LIMITS.straggler_after_s + 1
    assert pace.watch.is_slow(2) and not pace.watch.is_slow(0) and not pace.watch.is_slow(9)


@pytest.mark.parametrize("busy_s", [(1.0, 1.0, 1.0), (1.0, 1.1, 1.0), (1.0,)])
def test_equal_ranks_are_none(busy_s: tuple[float, ...]) -> None:
    assert Pace(*busy_s).train(900) == []


def test_who_keeps_up_again_is_told_and_who_is_in_between_is_not() -> None:
    pace = Pace(1.0, 1.0, 1.6)
    assert pace.train(120) == [(2, True)]
    pace.busy_s[2] = 1.22
    assert pace.train(300) == [], "between the two limits nothing changes"
    pace.busy_s[2] = 1.0
    assert pace.train(120) == [(2, False)]


def test_one_slow_window_is_not_enough() -> None:
    pace = Pace(1.0, 1.0, 1.0)
    for _ in range(5):
        pace.busy_s[1] = 2.0
        assert pace.train(LIMITS.straggler_after_s) == []
        pace.busy_s[1] = 1.0
        assert pace.train(LIMITS.straggler_after_s) == []


def test_a_new_life_is_measured_anew_and_a_former_one_has_no_voice() -> None:
    pace = Pace(1.0, 1.0, 2.0)
    pace.train(120)
    pace.watch.seen(2, 2, waiting=False)
    assert not pace.watch.is_slow(2)
    pace.watch.seen(2, 1, waiting=True)
    assert pace.watch._ranks[2].num_seen == 1


def test_a_pause_begins_a_new_window() -> None:
    pace = Pace(1.0, 1.0, 2.0)
    pace.train(29)
    pace.watch.restart(pace.now)
    assert pace.train(35) == []


def test_where_nobody_computes_there_is_nothing_to_compare() -> None:
    watch, found = Stragglers(LIMITS), []
    for now in range(400):
        for rank in (0, 1):
            for sample in range(2):
                watch.seen(rank, 1, waiting=bool((now + sample) % 40) and not (rank == 1 and now % 13 == 0))
        found += watch.tick(float(now))
    assert found == []
