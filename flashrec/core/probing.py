"""One round of indirect probes (SWIM): other nodes are asked to reach a suspect, and what they say is evidence.

"Could not look" is never "nothing there": a prober's failure counts only if the same prober, in the same round and over
the same path, has reached somebody else (its reference). A prober that has become doubtful itself does not count, and
while one that counts has not answered nothing is concluded. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

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

    def conclusion(self, fit: Collection[str]) -> str:
        """'reached', 'failed' or '' (not known, or not known yet). fit: nodes of which nothing is doubtful."""
        if self.reached_by():
            return REACHED
        if any(look not in self._said for look in self.looks() if look[0] in fit):
            return ""
        return FAILED if any(by in fit for by in self.failed_by()) else ""


def choose(node: str, fit: Collection[str], may_probe: Collection[str], num: int) -> dict[str, str]:
    """Up to `num` probers of `node` among those `fit`, each with its reference; the same for the same input."""
    others = _ring(fit, node)
    probers = [by for by in others if by in may_probe][:num]
    return {by: next(iter(_ring(others, by)), "") for by in probers}


def _ring(nodes: Iterable[str], start: str) -> list[str]:
    """In order of names, beginning behind `start` and without it: so neighbours share the work."""
    return sorted((node for node in nodes if node != start), key=lambda node: (node <= start, node))
