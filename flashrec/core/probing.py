"""One round of indirect probes (SWIM): other nodes are asked to reach a suspect, and what they say is evidence.

"Could not look" is never "nothing there": a prober's failure counts only if the same prober, in the same round and over
the same path, has reached somebody else (its reference). A prober that has become doubtful itself does not count, and
while one that counts has not answered nothing is concluded. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

import msgspec

REACHED, FAILED = "reached", "failed"


class Probe(msgspec.Struct, frozen=True):
    """Ask `by` whether it reaches this life of `node` over `path` ('control' or 'fabric'). number: its round."""

    number: int
    by: str
    node: str
    incarnation: int
    path: str


class Round:
    """asked: prober -> its reference ('': there is nobody else, so a failure of it says nothing)."""

    def __init__(self, number: int, node: str, asked: Mapping[str, str], asked_at: float) -> None:
        self.number, self.node, self.asked, self.asked_at = number, node, dict(asked), asked_at
        self._said: dict[tuple[str, str], bool | None] = {}

    def looks(self) -> list[tuple[str, str]]:
        """(prober, node to reach) pairs of this round."""
        return [(by, node) for by, reference in self.asked.items() for node in (self.node, reference) if node]

    def hear(self, by: str, node: str, reached: bool | None) -> None:
        """An answer; the first one stays. reached None: `by` could not look."""
        self._said.setdefault((by, node), reached)

    def reached_by(self) -> tuple[str, ...]:
        """Probers that have reached the node."""
        return tuple(by for by in self.asked if self._said.get((by, self.node)))

    def failed_by(self) -> tuple[str, ...]:
        """Probers that have not reached it although they reach somebody else."""
        return tuple(
            by
            for by, reference in self.asked.items()
            if self._said.get((by, self.node)) is False and self._said.get((by, reference))
        )

    def conclusion(self, fit: AbstractSet[str]) -> str:
        """'reached', 'failed' or '' (not known, or not known yet). fit: nodes of which nothing is doubtful."""
        if self.reached_by():
            return REACHED
        if any(look not in self._said for look in self.looks() if look[0] in fit):
            return ""
        return FAILED if any(by in fit for by in self.failed_by()) else ""


def choose(node: str, fit: Sequence[str], num: int, no_witness: str = "") -> dict[str, str]:
    """Up to `num` probers of `node`, each with its reference: its neighbours among those `fit` (in order of names), so
    that all share the work and the same are asked for the same. no_witness: a node that may only be a reference."""
    asked: dict[str, str] = {}
    for by in _ring(fit, node):
        if len(asked) >= num:
            break
        if by != no_witness:
            asked[by] = next((other for other in _ring(fit, by) if other != node), "")
    return asked


def _ring(fit: Sequence[str], start: str) -> Iterator[str]:
    """All but `start`, beginning behind it."""
    behind = bisect_right(fit, start)
    return (fit[at] for at in chain(range(behind, len(fit)), range(behind)) if fit[at] != start)
