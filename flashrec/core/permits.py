"""Who may put a checkpoint in place: never one that is older than what was permitted before, never a former life.

A permission is also a promise for `valid_s`: until then nobody gets one for a newer step if its holder may have been
replaced meanwhile, because that former holder may just now be doing what it was permitted. Its checkpoint can then not
land on top of a newer one. Pure; times are seconds of any one clock.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Permit(msgspec.Struct, frozen=True):
    """The answer. retry_at: not now, but ask again then (None: granted is final)."""

    granted: bool
    reason: str = ""
    retry_at: float | None = None


class Permits:
    """is_current tells whether (rank, incarnation) is still the life that trains this rank."""

    def __init__(self, valid_s: float, is_current: Callable[[int, int], bool]) -> None:
        self.valid_s, self._is_current = valid_s, is_current
        self.newest = -1
        self._open: dict[tuple[int, int], tuple[int, float]] = {}  # holder -> step, until when

    def ask(self, rank: int, incarnation: int, step: int, now: float) -> Permit:
        """May this life of the rank put its checkpoint of `step` in place?"""
        if not self._is_current(rank, incarnation):
            return Permit(False, f"rank {rank} has been replaced")
        if step < self.newest:
            return Permit(False, f"step {step} is older than {self.newest}, which was committed before")
        self._open = {holder: grant for holder, grant in self._open.items() if grant[1] > now}
        former = [
            until for holder, (older, until) in self._open.items() if older < step and not self._is_current(*holder)
        ]
        if former:
            return Permit(False, "a rank that was replaced may still be committing", max(former))
        self.newest = step
        self._open[rank, incarnation] = step, now + self.valid_s
        return Permit(True)
