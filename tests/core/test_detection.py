"""The detector: thresholds, refutation, lives, and the two doubts about ourselves. Time is an argument."""

from __future__ import annotations

import pytest

from flashrec.core.detection import Detector
from flashrec.core.limits import Timing

TIMING = Timing(suspect_after_s=1.0, dead_after_s=2.0, doubt_s=8.0, max_condemned=2, tick_interval_s=0.25)


class Clock:
    """Ticks a detector like the manager does; `heard` nodes send a heartbeat before every tick."""

    def __init__(self, nodes: list[str]) -> None:
        self.detector, self.now, self.seen = Detector(TIMING), 0.0, []
        for node in nodes:
            self.detector.joined(node, 1, 0.0)

    def run(self, seconds: float, heard: list[str], step: float = 0.25) -> list[tuple[float, str, str]]:
        end, new = self.now + seconds, []
        while self.now < end:
            self.now += step
            for node in heard:
                new += [(self.now, v.node, v.state) for v in self.detector.heard(node, 1, self.now)]
            new += [(self.now, v.node, v.state) for v in self.detector.tick(self.now).verdicts]
        return new


def test_silence_is_first_suspect_then_dead() -> None:
    clock = Clock(["n1", "n2"])
    assert clock.run(5.0, heard=["n2"]) == [(1.0, "n1", "suspect"), (2.0, "n1", "dead")]


def test_one_late_heartbeat_is_not_a_failure() -> None:
    clock = Clock(["n1"])
    assert clock.run(1.5, heard=[]) == [(1.0, "n1", "suspect")]
    assert clock.run(1.0, heard=["n1"])[0] == (1.75, "n1", "alive")
    assert clock.detector.state_of("n1") == "alive"


def test_nothing_refutes_death_and_a_new_life_starts_alive() -> None:
    clock = Clock(["n1"])
    clock.run(3.0, heard=[])
    assert clock.detector.heard("n1", 1, clock.now) == []
    assert clock.detector.state_of("n1") == "dead"
    clock.detector.joined("n1", 2, clock.now)
    assert clock.detector.state_of("n1") == "alive"
    assert clock.detector.heard("n1", 1, clock.now) == [], "the former life has no voice"
    assert clock.detector.disconnected("n1", 1, "late end of the former life") == []


def test_the_end_of_the_connection_is_a_verdict_once() -> None:
    clock = Clock(["n1"])
    (verdict,) = clock.detector.disconnected("n1", 1, "reset by the peer")
    assert (verdict.state, verdict.node) == ("dead", "n1")
    assert "reset by the peer" in verdict.reason
    assert clock.detector.disconnected("n1", 1, "again") == []
    assert clock.run(3.0, heard=[]) == []


@pytest.mark.parametrize("states", [{"DOWN"}, {"IDLE", "FAIL"}, {"DOWN", "NOT_RESPONDING"}])
def test_slurm_says_down(states: set[str]) -> None:
    clock = Clock(["n1"])
    (verdict,) = clock.detector.slurm_said("n1", frozenset(states))
    assert verdict.state == "dead"
    assert "Slurm" in verdict.reason


@pytest.mark.parametrize("states", [{"ALLOCATED"}, {"MIXED", "DRAIN"}, {"ALLOCATED", "NOT_RESPONDING"}, set()])
def test_slurm_says_nothing_fatal(states: set[str]) -> None:
    assert Clock(["n1"]).detector.slurm_said("n1", frozenset(states)) == []


def test_our_own_stall_is_given_back_to_everybody() -> None:
    clock = Clock(["n1", "n2"])
    clock.run(1.0, heard=["n1", "n2"])
    clock.now += 10.0  # the manager itself was stopped: it heard nobody because it did not listen
    assert clock.detector.tick(clock.now).verdicts == []
    assert clock.run(1.0, heard=["n1", "n2"]) == []
    assert [state for _, _, state in clock.run(5.0, heard=["n1"])] == ["suspect", "dead"], "real silence still counts"


def test_many_silent_at_once_gets_doubt_first() -> None:
    clock = Clock(["n1", "n2", "n3", "n4"])
    verdicts = clock.run(15.0, heard=["n4"])
    assert [(t, n) for t, n, s in verdicts if s == "dead"] == [(10.0, "n1"), (10.0, "n2"), (10.0, "n3")]
    clock = Clock(["n1", "n2", "n3", "n4"])
    verdicts = clock.run(15.0, heard=["n3", "n4"])
    assert [(t, n) for t, n, s in verdicts if s == "dead"] == [(2.0, "n1"), (2.0, "n2")]
