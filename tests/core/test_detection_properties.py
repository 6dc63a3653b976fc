"""Any order of signals. What must hold: a life that is dead stays dead, and only its link is mended; who beats on all
its paths is never suspected; a former life has no voice; verdicts change something, and say why; the same signals give
the same verdicts; who is asked to probe is alive.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flashrec.core.detection import Detector
from flashrec.core.limits import Timing
from flashrec.core.lives import CONTROL, FABRIC, Judgement, Verdict
from flashrec.core.probing import Probe

NODES = ("n1", "n2", "n3", "n4")
TIMING = Timing(tick_interval_s=0.25)
node = st.sampled_from(NODES)
path = st.sampled_from([CONTROL, FABRIC])
life = st.integers(0, 2)  # how many lives ago: mostly the current one
LOST = [frozenset({"DOWN"}), frozenset({"IDLE", "FAIL"})]
Call = tuple[str, tuple[Any, ...]]


class DetectorModel(RuleBasedStateMachine):
    """verdicts: all, in order. blames: since the last heartbeat of the node on the control path."""

    @initialize(home=st.sampled_from(["", "n4"]))
    def start(self, home: str) -> None:
        self.home, self.detector, self.now = home, Detector(TIMING, home), 0.0
        self.calls: list[Call] = []
        self.results: list[Any] = []
        self.lives: dict[str, int] = dict.fromkeys(NODES, 0)
        self.heard: dict[tuple[str, str], float] = {}
        self.state: dict[tuple[str, int], str] = {}
        self.link: dict[tuple[str, int], str] = {}
        self.blamed: set[str] = set()
        self.open: list[Probe] = []
        for name in NODES:
            self.join(name)

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, args))
        result = getattr(self.detector, method)(*args)
        self.results.append(result)
        for verdict in result.verdicts if isinstance(result, Judgement) else result or []:
            self.check(verdict)
        if isinstance(result, Judgement):
            for probe in result.probes:
                assert self.detector.state_of(probe.by) == "alive"
                assert probe.by != probe.node
                assert probe.path == FABRIC or probe.by != self.home
                assert probe.incarnation == self.lives[probe.node]
            self.open = (self.open + result.probes)[-20:]
        return result

    def check(self, verdict: Verdict) -> None:
        who = (verdict.node, verdict.incarnation)
        assert verdict.incarnation == self.lives[verdict.node], "a former life is judged no more"
        assert verdict.reason
        assert verdict.kind in ("lost", "link", "asked", "slurm")
        assert self.state.get(who) not in ("dead", "left"), "a life that is over is judged no more"
        if verdict.kind == "link":
            assert verdict.state in ("dead", "alive")
            assert verdict.state != self.link.get(who, "alive"), "it changes something"
            self.link[who] = verdict.state
            if verdict.state == "dead" and verdict.silent_s:
                assert self.now - self.heard[verdict.node, FABRIC] >= TIMING.fabric_dead_after_s - 1e-9
                assert self.state.get(who, "alive") == "alive", "its control path answers"
            return
        assert verdict.state != self.state.get(who, "alive"), "it changes something"
        if verdict.state == "suspect":
            silent_s = self.now - self.heard[verdict.node, CONTROL]
            assert silent_s >= TIMING.suspect_after_s - 1e-9 or verdict.node in self.blamed
        if verdict.state == "dead" and verdict.silent_s:
            assert verdict.silent_s >= TIMING.hasten_after_s - 1e-9
            assert self.now - self.heard[verdict.node, CONTROL] >= TIMING.hasten_after_s - 1e-9
        self.state[who] = verdict.state

    @rule(name=node)
    def join(self, name: str) -> None:
        self.lives[name] += 1
        self.heard[name, CONTROL] = self.now
        self.heard.pop((name, FABRIC), None)
        self.blamed.discard(name)
        self.call("joined", name, self.lives[name], self.now)

    @rule(name=node, ago=life, on=path)
    def hear(self, name: str, ago: int, on: str) -> None:
        if ago == 0:
            self.heard[name, on] = self.now
            if on == CONTROL:
                self.blamed.discard(name)
        self.call("heard", name, self.lives[name] - ago, self.now, on)

    @rule(name=node, ago=life, up=st.booleans())
    def session(self, name: str, ago: int, up: bool) -> None:
        incarnation = self.lives[name] - ago
        if up and ago == 0:
            self.heard[name, FABRIC] = self.now
        self.call(*(("fabric_up", name, incarnation, self.now) if up else
                    ("fabric_down", name, incarnation, "why", self.now)))  # fmt: skip

    @rule(on=path)
    def blind(self, on: str) -> None:
        self.call("blind", on, self.now, "the hub was respawned")

    @rule(name=node, ago=st.sampled_from([0, 1, 2]))
    def disconnect(self, name: str, ago: int) -> None:
        self.call("disconnected", name, self.lives[name] - ago, "reset by the peer")

    @rule(name=node, states=st.sampled_from([*LOST, frozenset({"DRAIN"}), frozenset()]))
    def slurm(self, name: str, states: frozenset[str]) -> None:
        self.call("slurm_said", name, states)

    @rule(name=node, leave=st.booleans())
    def dismiss(self, name: str, leave: bool) -> None:
        self.call(*(("left", name) if leave else ("condemn", name, "asked for")))

    @rule(name=node, by=node)
    def blame(self, name: str, by: str) -> None:
        self.blamed.add(name)
        self.call("blamed", name, by, self.now)

    @rule(which=st.integers(0, 19), reached=st.sampled_from([True, False, None]))
    def answer(self, which: int, reached: bool | None) -> None:
        if self.open:
            probe = self.open[which % len(self.open)]
            self.call("probed", probe.number, probe.by, probe.node, reached)

    @rule(reached=st.sampled_from([True, False, None]), suspect=node)
    def answer_all(self, reached: bool | None, suspect: str) -> None:
        for probe in self.open:
            self.call("probed", probe.number, probe.by, probe.node, reached if probe.node == suspect else True)

    @rule(seconds=st.sampled_from([0.125, 0.25, 0.375, 3.0]), beats=st.sets(node), also_fabric=st.booleans())
    def tick(self, seconds: float, beats: set[str], also_fabric: bool) -> None:
        self.now += seconds
        for name in sorted(beats):
            for on in (CONTROL, FABRIC) if also_fabric else (CONTROL,):
                self.hear(name, 0, on)
        self.call("tick", self.now)

    @rule(seconds=st.integers(1, 8), beats=st.sets(node))
    def go_on(self, seconds: int, beats: set[str]) -> None:
        """Long enough for a verdict, with a probe answered here and there."""
        for index in range(4 * seconds):
            self.tick(0.25, beats, also_fabric=True)
            self.answer(index, index % 3 != 0)

    @invariant()
    def who_beats_everywhere_is_no_suspect(self) -> None:
        for name in NODES:
            fresh = all(self.now - at < TIMING.suspect_after_s for (n, _), at in self.heard.items() if n == name)
            if fresh and name not in self.blamed:
                assert self.detector.state_of(name) != "suspect"

    @invariant()
    def it_agrees_with_what_it_said(self) -> None:
        for name in NODES:
            who = (name, self.lives[name])
            assert self.detector.state_of(name) == self.state.get(who, "alive")
            if self.link.get(who) == "dead":
                assert self.detector.is_link_dead(name)

    def teardown(self) -> None:
        if hasattr(self, "calls"):
            again = Detector(TIMING, self.home)
            assert [getattr(again, method)(*args) for method, args in self.calls] == self.results


TestDetector = DetectorModel.TestCase
TestDetector.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
