"""A detector in a world of its own: who beats on which path, who reaches whom, and a clock that the test moves.

Ticks and heartbeats come as in the manager; probes are answered after `ANSWER_S` from `reaches`.
"""

from __future__ import annotations

from collections.abc import Callable

from flashrec.core.detection import Detector
from flashrec.core.limits import Timing
from flashrec.core.lives import CONTROL, FABRIC, Note, Verdict
from flashrec.core.probing import Probe

TICK_S, ANSWER_S = 0.125, 0.375
TIMING = Timing(tick_interval_s=TICK_S)
Reaches = Callable[[str, str, str], bool | None]  # (by, node, path)


def nobody_can_look(by: str, node: str, path: str) -> bool | None:
    return None


def all_but(*lost: str, path: str = "") -> Reaches:
    """Everybody reaches everybody but `lost` (on one path, or on both)."""
    return lambda by, node, on: not (node in lost and path in ("", on))


class World:
    """beats: path -> nodes whose heartbeats arrive. said: (time, verdict); notes and probes likewise."""

    def __init__(self, *nodes: str, fabric: bool = False, home: str = "", timing: Timing = TIMING) -> None:
        self.detector, self.now, self.nodes = Detector(timing, home), 0.0, nodes
        self.beats = {CONTROL: set(nodes), FABRIC: set(nodes) if fabric else set()}
        self.reaches: Reaches = nobody_can_look
        self.incarnations = dict.fromkeys(nodes, 1)
        self.said: list[tuple[float, Verdict]] = []
        self.probes: list[tuple[float, Probe]] = []
        self.notes: list[tuple[float, Note]] = []
        self._answers: list[tuple[float, Probe]] = []
        for node in nodes:
            self.detector.joined(node, 1, 0.0)
            if fabric:
                self.detector.fabric_up(node, 1, 0.0)

    def silence(self, *nodes: str, paths: tuple[str, ...] = (CONTROL, FABRIC)) -> None:
        for path in paths:
            self.beats[path] -= set(nodes)

    def speak(self, *nodes: str, paths: tuple[str, ...] = (CONTROL, FABRIC)) -> None:
        for path in paths:
            self.beats[path] |= set(nodes)

    def take(self, verdicts: list[Verdict]) -> None:
        self.said += [(self.now, verdict) for verdict in verdicts]

    def tick(self, seconds: float = TICK_S) -> None:
        self.now += seconds
        for path, nodes in self.beats.items():
            for node in sorted(nodes):
                self.take(self.detector.heard(node, self.incarnations[node], self.now, path))
        due = [probe for at, probe in self._answers if at <= self.now]
        self._answers = [(at, probe) for at, probe in self._answers if at > self.now]
        for probe in due:
            if probe.by in self.beats[CONTROL]:
                reached = self.reaches(probe.by, probe.node, probe.path)
                self.detector.probed(probe.number, probe.by, probe.node, reached)
        found = self.detector.tick(self.now)
        self.take(found.verdicts)
        self.notes += [(self.now, note) for note in found.notes]
        self.probes += [(self.now, probe) for probe in found.probes]
        self._answers += [(self.now + ANSWER_S, probe) for probe in found.probes]

    def run(self, seconds: float) -> World:
        end = self.now + seconds
        while self.now < end:
            self.tick()
        return self

    def states(self, node: str, kind: str = "") -> list[tuple[float, str]]:
        """(time, state) of the verdicts on a node."""
        return [(t, v.state) for t, v in self.said if v.node == node and (not kind or v.kind == kind)]

    def last(self) -> Verdict:
        return self.said[-1][1]
