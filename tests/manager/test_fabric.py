"""The manager's fabric, with its hub played: who is offered what, what the detector is told, and what people."""

from __future__ import annotations

from typing import Any

import pytest

from flashrec.config.schema import Fabric as Settings
from flashrec.manager import fabric as module
from flashrec.manager.control import Link
from flashrec.transport.mpi import words
from flashrec.wire import messages as m

OURS = words.Means("MPICH 4.3.2", "ofi;tcp", "eth1", "10.2.0.1", 7001)
PORTS = tuple(f"port{n}" for n in range(256))


class Hub:
    """Plays the supervisor and its child."""

    def __init__(self, role: str, settings: words.Settings, hear: Any, gone: Any) -> None:
        self.settings, self.hear, self.gone = settings, hear, gone
        self.life, self.pid, self.silent_s = 1, 1, 0.0
        self.told: list[words.Word] = []

    def say(self, word: words.Word) -> None:
        self.told.append(word)


class Desk:
    """Everything around the manager's fabric; each call is one moment of `now`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now = 100.0
        monkeypatch.setattr(module, "Supervisor", Hub)
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        self.said: list[str] = []
        monkeypatch.setattr(module, "say", self.said.append)
        self.links: dict[str, Link] = {}
        self.watched: list[tuple[Any, ...]] = []
        self.sent: list[tuple[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self.refusals: list[str] = []
        self.fabric = module.Fabric(
            Settings(**settings), "127.0.0.1", self.links, self, lambda node, word: self.sent.append((node, word)),
            lambda verdicts: None, lambda what, **fields: self.notes.append({"what": what, **fields}),
            self.refusals.append,
        )  # fmt: skip
        self.hub: Hub = self.fabric._hub  # type: ignore[assignment]

    # the detector

    def heard(self, node: str, incarnation: int, now: float, path: str) -> list[Any]:
        self.watched.append(("heard", node, incarnation, path))
        return []

    def fabric_up(self, node: str, incarnation: int, now: float) -> list[Any]:
        self.watched.append(("up", node, incarnation))
        return []

    def fabric_down(self, node: str, incarnation: int, reason: str, now: float) -> list[Any]:
        self.watched.append(("down", node, incarnation, reason))
        return []

    def blind(self, path: str, now: float, reason: str) -> list[Any]:
        self.watched.append(("blind", path, reason))
        return []

    # what happens

    def loaded(self) -> None:
        self.hub.hear(words.Loaded(OURS, PORTS))

    def joined(self, *nodes: str, incarnation: int = 1) -> None:
        for node in nodes:
            self.links[node] = Link(node, incarnation, 1, "10.1.0.9", None)  # type: ignore[arg-type]
        self.look()

    def look(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.fabric._look(self.now)

    def says(self, node: str, message: Any) -> None:
        self.fabric.said(self.links[node], message)

    def ready(self, node: str, **changes: Any) -> None:
        fields = {"library": "MPICH 4.3.2", "provider": "ofi;tcp", "interface": "eth1", "address": "10.2.0.9"} | changes
        self.says(node, m.FabricReady(self.hub.life, **fields))

    def of(self, kind: type, node: str) -> list[Any]:
        return [message for to, message in self.sent if to == node and isinstance(message, kind)]

    def up(self, *nodes: str) -> None:
        self.joined(*nodes)
        for node in nodes:
            self.ready(node)
            self.look()
            session = self.of(m.FabricPort, node)[-1].session
            self.says(node, m.FabricGoing(session))
            self.beat(node, 1)

    def session(self, node: str) -> int:
        return self.of(m.FabricPort, node)[-1].session

    def beat(self, node: str, sequence: int) -> None:
        self.hub.hear(words.Beats(((self.session(node), sequence),)))


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk(monkeypatch)
    made.loaded()
    return made


def test_the_hub_is_told_to_accept_only_who_is_in_connect(desk: Desk) -> None:
    desk.joined("n1")
    assert [type(message) for _, message in desk.sent] == [m.FabricOffered]
    desk.ready("n1")
    desk.look()
    (port,) = desk.of(m.FabricPort, "n1")
    assert (port.port, port.address, port.knock) == ("port0", "10.2.0.1", 7001)
    assert desk.hub.told == []
    desk.says("n1", m.FabricGoing(port.session + 1))
    assert desk.hub.told == [], "another session's word"
    desk.says("n1", m.FabricGoing(port.session))
    assert desk.hub.told == [words.Accept(port.session, 1, "port0")]
    assert desk.watched == []
    desk.beat("n1", 1)
    desk.beat("n1", 2)
    assert desk.watched == [("up", "n1", 1), ("heard", "n1", 1, "fabric")]


def test_few_meet_at_a_time_and_no_port_is_used_twice(desk: Desk) -> None:
    nodes = [f"n{n}" for n in range(10)]
    desk.joined(*nodes)
    for node in nodes:
        desk.ready(node)
    desk.look()
    asked = [message for _, message in desk.sent if isinstance(message, m.FabricPort)]
    assert [port.port for port in asked] == [f"port{n}" for n in range(module.MAX_MEETING)]
    desk.says("n0", m.FabricGoing(asked[0].session))
    desk.look()
    assert len(desk.of(m.FabricPort, "n4")) == 0
    desk.beat("n0", 1)
    desk.look()
    assert [port.port for port in desk.of(m.FabricPort, "n4")] == ["port4"]


def test_a_life_that_has_ended_is_dropped_and_has_no_voice(desk: Desk) -> None:
    desk.up("n1")
    former, session = desk.links["n1"], desk.session("n1")
    desk.joined("n1", incarnation=2)
    assert words.Drop(session) in desk.hub.told
    seen = list(desk.watched)
    desk.hub.hear(words.Beats(((session, 7),)))
    desk.fabric.said(former, m.FabricReady(1, "MPICH 4.3.2", "ofi;tcp"))
    desk.look()
    assert desk.watched == seen
    assert len(desk.of(m.FabricPort, "n1")) == 1


def test_a_beater_that_sends_nothing_is_not_held_against_the_link(desk: Desk) -> None:
    """It is stopped, starved or stuck: its agent, over the control connection, says how many were sent."""
    desk.up("n1", "n2")
    desk.beat("n1", 4)
    for _ in range(4):
        desk.look(after_s=0.25)
        desk.says("n1", m.AgentHeartbeat(1, 1, fabric=(desk.session("n1"), 4)))
        desk.says("n2", m.AgentHeartbeat(1, 1, fabric=(desk.session("n2"), 9)))
    desk.look()
    assert desk.watched[-1] == ("down", "n1", 1, "its MPI beater sends nothing")
    assert not [what for what in desk.watched if what[0] == "down" and what[1] == "n2"], "9 were sent, 1 came"
    desk.beat("n1", 5)
    assert desk.watched[-1] == ("up", "n1", 1)


def test_what_is_sent_and_does_not_come_is_the_links_silence_and_a_fresh_session_is_tried(desk: Desk) -> None:
    desk.up("n1")
    for _ in range(10):
        desk.look(after_s=module.SILENT_S / 10)
        desk.says("n1", m.AgentHeartbeat(1, 1, fabric=(desk.session("n1"), 60)))
    assert desk.watched == [("up", "n1", 1)] and len(desk.of(m.FabricOffered, "n1")) == 1
    desk.look(after_s=0.1)
    assert desk.watched[-1] == ("down", "n1", 1, "what it sends has not come for 15 s")
    desk.look(after_s=1.0)
    assert len(desk.of(m.FabricOffered, "n1")) == 2


def test_what_was_sent_in_a_former_session_says_nothing_about_this_one(desk: Desk) -> None:
    desk.up("n1")
    for _ in range(4):
        desk.look(after_s=0.25)
        desk.says("n1", m.AgentHeartbeat(1, 1, fabric=(desk.session("n1") + 1, 0)))
    desk.look()
    assert desk.watched == [("up", "n1", 1)]


def test_an_answer_to_the_offer_of_a_former_hub_is_no_answer(desk: Desk) -> None:
    desk.joined("n1")
    desk.hub.gone("killed")
    desk.hub.life = 2
    desk.loaded()
    desk.look()
    desk.says("n1", m.FabricReady(1, "MPICH 4.3.2", "ofi;tcp", "eth1"))
    desk.look()
    assert desk.of(m.FabricPort, "n1") == []
    desk.ready("n1")
    desk.look()
    assert len(desk.of(m.FabricPort, "n1")) == 1


def test_an_agent_that_is_silent_itself_proves_nothing_about_its_beater(desk: Desk) -> None:
    desk.up("n1")
    desk.says("n1", m.AgentHeartbeat(1, 1, fabric=(desk.session("n1"), 1)))
    desk.look(after_s=5.0)
    assert desk.watched[-1] == ("up", "n1", 1)


def test_an_ended_session_is_unknown_and_tried_again_later_and_later(desk: Desk) -> None:
    desk.up("n1")
    waits = []
    for _ in range(9):
        desk.says("n1", m.FabricEnded(desk.session("n1"), "killed"))
        count, since = len(desk.of(m.FabricOffered, "n1")), desk.now
        while len(desk.of(m.FabricOffered, "n1")) == count:
            desk.look(after_s=0.1)
        waits.append(round(desk.now - since))
        desk.ready("n1")
        desk.look()
    assert ("down", "n1", 1, "killed") in desk.watched
    assert waits == sorted(waits)
    assert waits[0] == 1 and waits[-1] == module.MAX_RETRY_S


def test_a_lost_hub_is_our_own_blindness_and_all_are_offered_the_next(desk: Desk) -> None:
    desk.up("n1", "n2")
    desk.look()
    desk.hub.gone("killed by SIGKILL")
    assert ("blind", "fabric", "our MPI hub was lost: killed by SIGKILL") in desk.watched
    assert {what[1] for what in desk.watched if what[0] == "down"} == {"n1", "n2"}
    assert "the MPI hub is replaced: killed by SIGKILL" in desk.said
    count = len(desk.watched)
    desk.look(after_s=0.1)
    assert desk.watched[count:] == [("blind", "fabric", "our MPI hub was lost")], "as long as there is none"
    desk.hub.life = 2
    desk.loaded()
    desk.look()
    assert [desk.of(m.FabricOffered, node)[-1].hub for node in ("n1", "n2")] == [2, 2]


@pytest.mark.parametrize("how", ["silent", "slow"])
def test_while_the_hub_cannot_hear_nobody_is_blamed(desk: Desk, how: str) -> None:
    desk.up("n1")
    if how == "silent":
        desk.hub.silent_s = module.BLIND_S + 0.1
        desk.look()
    else:
        desk.hub.hear(words.Accepted(1, 0.01))
        assert desk.watched[-1][0] == "up"
        desk.hub.hear(words.Ended(7, "Accept: timed out", 1.0))
    assert desk.watched[-1][:2] == ("blind", "fabric")


def test_what_is_watched_is_said_once(desk: Desk) -> None:
    desk.up("n1", "n2")
    desk.look()
    desk.joined("n3")
    desk.look(after_s=60)
    assert desk.said == ["fabric: MPICH 4.3.2, ofi;tcp on eth1, 2 nodes"]


def test_who_is_missing_is_said_with_the_reason(desk: Desk) -> None:
    desk.up("n1")
    desk.joined("n2", "n3", "n4")
    desk.ready("n2", library="MPICH 4.1.2")
    desk.ready("n3", problem="mpi4py is not installed")
    assert desk.said == []
    desk.look(after_s=module.SETTLED_S + 1)
    assert desk.said == [
        "fabric: MPICH 4.3.2, ofi;tcp on eth1, 1 node; not on n2: it has MPICH 4.1.2, ofi;tcp on eth1 and the manager "
        "MPICH 4.3.2, ofi;tcp on eth1: they cannot meet; install the same on all nodes; "
        "not on n3: mpi4py is not installed; not on n4: not yet"
    ]
    assert desk.refusals == [] and desk.of(m.FabricPort, "n2") == []


def test_without_a_usable_hub_that_is_said_once_and_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    desk.hub.hear(words.Unusable("mpi4py is not installed"))
    desk.joined("n1")
    desk.look(after_s=100)
    assert desk.said == ["the fabric is not watched: mpi4py is not installed"]
    assert desk.sent == [] and desk.watched == []


def test_a_required_fabric_that_a_node_cannot_have_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, mpi="required")
    desk.loaded()
    desk.up("n1")
    desk.joined("n2")
    desk.ready("n2", problem="mpi4py is not installed")
    desk.look()
    assert desk.refusals == ["fabric.mpi is required, and the fabric is not watched on n2: mpi4py is not installed"]


def test_a_required_fabric_may_take_its_time_but_not_fail_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, mpi="required")
    desk.loaded()
    desk.joined("n1", "n2")
    desk.look(after_s=module.SETTLED_S + 1)
    assert desk.said == ["the fabric is not watched: not on n1, n2: not yet"] and desk.refusals == []
    for node in ("n1", "n2"):
        desk.ready(node)
        desk.look()
        desk.says(node, m.FabricGoing(desk.session(node)))
        desk.beat(node, 1)
        desk.look()
    assert desk.said[1:] == ["fabric: MPICH 4.3.2, ofi;tcp on eth1, 2 nodes"]

    desk = Desk(monkeypatch, mpi="required")
    desk.loaded()
    desk.up("n1")
    desk.joined("n2")
    for _ in range(module.MANY_FAILURES):
        desk.look(after_s=2.0)
        desk.ready("n2")
        desk.look()
        desk.says("n2", m.FabricEnded(desk.session("n2"), "no way over eth1"))
    desk.look(after_s=module.SETTLED_S)
    assert desk.refusals == ["fabric.mpi is required, and the fabric is not watched on n2: no way over eth1"]
