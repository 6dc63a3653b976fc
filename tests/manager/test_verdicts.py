"""What becomes of a verdict, and of workers' blame: who is cut off, what the machine is told, what root is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from flashrec.config.schema import Detection
from flashrec.core import events as e
from flashrec.core.detection import Detector
from flashrec.core.lives import Verdict
from flashrec.core.probing import Probe
from flashrec.core.types import Phase
from flashrec.manager import verdicts as module
from flashrec.manager.verdicts import Verdicts
from flashrec.wire import messages as m

ADDRESSES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3", "n4": "10.0.0.9", "n5": "10.0.0.9"}


class Desk:
    """The rest of the manager; `acts` is what it was asked to do, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, job_id: int | None = 7) -> None:
        self.job_id, self.acts = job_id, []
        self.machine = SimpleNamespace(phase=Phase.RUNNING, generation=3)
        self.journal = SimpleNamespace(note=lambda what, **fields: None, verdict=lambda *line: None)
        links = {node: SimpleNamespace(node=node, address=address) for node, address in ADDRESSES.items()}
        self.places: dict[str, tuple[str, int]] = {"n1": ("10.0.0.1", 4000)}
        self.sent: list[tuple[str, m.Message]] = []
        self.control = SimpleNamespace(
            links=links, cut=lambda node, reason: self.acts.append(("cut", node)), bar=lambda node, why: None,
            nodes_at=lambda address: [node for node, place in ADDRESSES.items() if place == address],
            probe_place=lambda node, path: self.places.get(node), send=lambda *said: self.sent.append(said),
        )  # fmt: skip
        self.detector = Detector(Detection())
        for node in ADDRESSES:
            self.detector.joined(node, 1, 0.0)
        self.verdicts = Verdicts(self, self.detector, Detection())  # type: ignore[arg-type]
        monkeypatch.setattr(module, "report_faulty", lambda job, node, reason, env: self.acts.append(("report", node)))

    def emit(self, event: e.AnyEvent) -> None:
        self.acts.append(event)

    def abandon(self, node: str) -> None:
        self.acts.append(("abandon", node))

    def blame(self, by: str, *addresses: str, generation: int = 3) -> str:
        """The state of n2 afterwards."""
        self.verdicts.peers_blamed(self.control.links[by], m.PeersBlamed(0, 1, generation, addresses))
        return self.detector.state_of("n2")


def test_a_lost_node_is_cut_off_and_told_to_the_machine_and_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    desk.verdicts.judge([Verdict("n2", 1, "dead", "silent for 2 s", silent_s=2.0)])
    assert desk.acts == [
        ("cut", "n2"), ("abandon", "n2"), e.NodeCondemned("n2", 1, "silent for 2 s", "lost"), ("report", "n2"),
    ]  # fmt: skip


def test_a_lost_link_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    desk.verdicts.judge([Verdict("n2", 1, "dead", "fabric link lost", "link", silent_s=2.0)])
    desk.verdicts.judge([Verdict("n2", 1, "alive", "heard again", "link")])
    assert desk.acts == [
        e.NodeCondemned("n2", 1, "fabric link lost", "link"), ("report", "n2"),
        e.NodeMended("n2", 1, "heard again", "link"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("job_id", "verdict"),
    [
        (7, Verdict("n2", 1, "dead", "control connection ended: reset by the peer")),
        (7, Verdict("n2", 1, "dead", "Slurm says DOWN", "slurm")),
        (7, Verdict("n2", 1, "dead", "asked for", "asked")),
        (None, Verdict("n2", 1, "dead", "silent for 2 s", silent_s=2.0)),
    ],
)
def test_root_is_told_of_silence_alone(job_id: int | None, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, job_id)

    async def scene() -> None:
        desk.verdicts.judge([verdict])

    asyncio.run(scene())
    assert ("cut", "n2") in desk.acts and ("report", "n2") not in desk.acts


def test_a_suspicion_and_the_end_of_it_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    states = ("suspect", "alive", "left")
    desk.verdicts.judge([Verdict("n2", 1, state, "why", silent_s=1.0) for state in states])
    assert desk.acts == []


def test_after_the_end_nobody_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    desk.machine.phase = Phase.STOPPED
    desk.verdicts.judge([Verdict("n2", 1, "dead", "control connection ended")])
    assert desk.acts == []


def test_whom_two_nodes_blame_is_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    assert desk.blame("n1", ADDRESSES["n2"]) == "alive"
    assert desk.blame("n3", ADDRESSES["n2"], "10.9.9.9") == "suspect"
    assert desk.acts == [], "it is looked at, not condemned"


@pytest.mark.parametrize("generation", [2, 4])
def test_blame_of_another_generation_is_stale(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    desk.blame("n1", ADDRESSES["n2"], generation=generation)
    assert desk.blame("n3", ADDRESSES["n2"], generation=generation) == "alive"


def test_an_address_of_two_nodes_blames_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    for by in ("n1", "n3"):
        desk.blame(by, ADDRESSES["n4"])
    assert desk.detector.state_of("n4") == desk.detector.state_of("n5") == "alive"


def test_a_probe_is_asked_where_the_node_answers_and_else_it_is_known_that_nobody_could_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(monkeypatch)
    answers: list[Any] = []
    monkeypatch.setattr(desk.detector, "probed", lambda *answer: answers.append(answer))
    desk.verdicts._ask(Probe(9, "n3", "n1", 1, "control"))
    desk.verdicts._ask(Probe(9, "n3", "n2", 1, "control"))
    assert desk.sent == [("n3", m.ProbeAsked(9, "n1", 1, "control", "10.0.0.1", 4000, Detection().probe_timeout_s))]
    assert answers == [(9, "n3", "n2", None)]


def test_connections_that_end_together_are_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        desk = Desk(monkeypatch)
        for node in ("n2", "n3"):
            desk.verdicts.judge([Verdict(node, 1, "dead", "reset")])
        assert [act for act in desk.acts if isinstance(act, e.Event)] == [], "there may be more"
        while not isinstance(desk.acts[-1], e.Event):
            await asyncio.sleep(0.001)
        found = tuple(e.NodeCondemned(node, 1, "reset", "lost") for node in ("n2", "n3"))
        assert [act for act in desk.acts if isinstance(act, e.Event)] == [e.NodesCondemned(found)]

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_the_machine_hears_of_the_end_of_a_life_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        desk = Desk(monkeypatch)
        desk.verdicts.judge([Verdict("n2", 1, "dead", "reset")])
        desk.verdicts.flush()  # as the manager does before each event
        assert desk.acts[-1] == e.NodeCondemned("n2", 1, "reset", "lost")
        desk.verdicts.flush()
        await asyncio.sleep(2 * module.GATHER_S)
        assert len([act for act in desk.acts if isinstance(act, e.Event)]) == 1, "said once"

    asyncio.run(asyncio.wait_for(scene(), 10))
