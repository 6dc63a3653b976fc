"""Stragglers: ranks that the others wait for in every step. Pure: time is an argument. Reported, never acted upon.

All ranks take the same time for a step, but a slow one spends less of it waiting in collectives. From the share of
heartbeats at which a rank was seen waiting follows its busy share, and from that how much longer than the others it
takes: busy for 90 % of a step where the others are busy for 60 % is 1.5 times as long. A window of `straggler_after_s`
is judged at a time, two in a row decide, and a slow rank keeps up again only below half way to the limit.
"""

from __future__ import annotations

import statistics

import msgspec

from flashrec.core.limits import HangLimits

MIN_SAMPLES = 40  # heartbeats that a share is told from
MIN_BUSY = 0.05  # nobody is busy: nothing to compare with


class Straggler(msgspec.Struct, frozen=True):
    """is_slow False: it keeps up again. factor: its busy time to that of the others (their median)."""

    rank: int
    incarnation: int
    is_slow: bool
    factor: float
    reason: str


class _Pace(msgspec.Struct):
    incarnation: int
    num_seen: int = 0
    num_waiting: int = 0
    windows: int = 0  # in a row that speak against the verdict as it is
    is_slow: bool = False


class Stragglers:
    """Counts who waits how often."""

    def __init__(self, limits: HangLimits, tags_every: int = 1) -> None:
        """tags_every: only one heartbeat in so many is seen, so windows are so many times as long."""
        self._limits = limits
        self._window_s = tags_every * limits.straggler_after_s
        self._ranks: dict[int, _Pace] = {}
        self._window_at: float | None = None

    def seen(self, rank: int, incarnation: int, waiting: bool) -> None:
        """One heartbeat of a rank that trains (is neither quiet nor between steps)."""
        pace = self._ranks.get(rank)
        if pace is None or pace.incarnation < incarnation:
            pace = self._ranks[rank] = _Pace(incarnation)
        if pace.incarnation == incarnation:
            pace.num_seen += 1
            pace.num_waiting += waiting

    def restart(self, now: float) -> None:
        """What was counted so far is not one stretch of training: begin a new window."""
        self._window_at = now
        for pace in self._ranks.values():
            pace.num_seen = pace.num_waiting = 0

    def tick(self, now: float) -> list[Straggler]:
        """Verdicts that have changed."""
        if self._window_at is None:
            self._window_at = now
        if now - self._window_at < self._window_s:
            return []
        known = {rank: pace for rank, pace in self._ranks.items() if pace.num_seen >= MIN_SAMPLES}
        busy = {rank: 1 - pace.num_waiting / pace.num_seen for rank, pace in known.items()}
        found = []
        for rank, pace in known.items() if len(known) > 1 else ():
            usual = statistics.median(share for other, share in busy.items() if other != rank)
            factor = busy[rank] / usual if usual >= MIN_BUSY else 1.0
            if self._changes(pace, factor):
                reason = (
                    f"waits {1 - busy[rank]:.0%} of the time, the others {1 - usual:.0%}: "
                    f"it takes {factor:.2f} times as long as they"
                )
                found.append(Straggler(rank, pace.incarnation, pace.is_slow, factor, reason))
        self.restart(now)
        return found

    def is_slow(self, rank: int) -> bool:
        return rank in self._ranks and self._ranks[rank].is_slow

    def _changes(self, pace: _Pace, factor: float) -> bool:
        limit = self._limits.straggler_factor
        against = factor < (1 + limit) / 2 if pace.is_slow else factor >= limit
        pace.windows = pace.windows + 1 if against else 0
        if pace.windows < 2:
            return False
        pace.windows, pace.is_slow = 0, not pace.is_slow
        return True
