"""The agent's side of the rendezvous, its beater played: a fresh one for each meeting, and nothing said of a former."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flashrec.agent import fabric as module
from flashrec.agent.fabric import Fabric
from flashrec.transport.mpi import words
from flashrec.wire import messages as m

MINE = words.Means("MPICH 4.3.2", "ofi;tcp", "eth1", "10.2.0.9")
PORT = ("port0", "10.2.0.1", 7001)


class Beater:
    """Plays the supervisor and its child."""

    def __init__(self, role: str, settings: words.Settings, hear: Any, gone: Any) -> None:
        self.role, self.settings, self.hear, self.gone = role, settings, hear, gone
        self.told: list[words.Word] = []
        self.renewals = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    def say(self, word: words.Word) -> None:
        self.told.append(word)

    def renew(self, reason: str) -> None:
        self.renewals += 1
        self.gone(reason)


def play(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """act(fabric, sent, beater): beater() is the one that was started."""
    made: list[Beater] = []
    monkeypatch.setattr(module, "Supervisor", lambda *words: made.append(Beater(*words)) or made[-1])

    async def run() -> None:
        sent: list[m.Message] = []
        fabric = Fabric(3, "10.1.0.9", sent.append)
        act(fabric, sent, lambda: made[-1])
        await fabric.close()

    asyncio.run(run())


def offer(hub: int = 1) -> m.FabricOffered:
    return m.FabricOffered(hub, "tcp", "eth1", "", (7000, 7099), 0.25)


def test_a_beater_is_started_at_the_first_offer_and_meets_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(fabric: Fabric, sent: list[m.Message], beater: Any) -> None:
        fabric.take(offer())
        assert beater().settings == words.Settings("tcp", "eth1", "10.1.0.9", "", (7000, 7099), 0.25)
        assert sent == []
        beater().hear(words.Loaded(MINE))
        fabric.take(m.FabricPort(55, *PORT))
        assert beater().told == [words.Meet(55, 3, "port0", ("10.2.0.1", 7001))]
        beater().hear(words.Going(55))
        beater().hear(words.Beats(((55, 8),)))
        assert sent == [m.FabricReady(1, "MPICH 4.3.2", "ofi;tcp", "eth1", "10.2.0.9"), m.FabricGoing(55)]
        assert fabric.sent == (55, 8)

    play(monkeypatch, act)


def test_the_same_hub_is_met_by_a_fresh_process_and_another_hub_by_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second session between the same two processes may reuse a connection that is wedged."""

    def act(fabric: Fabric, sent: list[m.Message], beater: Any) -> None:
        fabric.take(offer(hub=1))
        beater().hear(words.Loaded(MINE))
        fabric.take(m.FabricPort(55, *PORT))
        fabric.take(offer(hub=2))
        assert beater().renewals == 0 and isinstance(sent[-1], m.FabricReady) and sent[-1].hub == 2
        fabric.take(m.FabricPort(56, *PORT))
        sent.clear()
        fabric.take(offer(hub=2))
        assert beater().renewals == 1 and sent == [], "not ready before the fresh one has loaded"
        beater().hear(words.Loaded(MINE))
        assert [type(message) for message in sent] == [m.FabricReady]

    play(monkeypatch, act)


def test_a_lost_beater_ends_its_session_and_a_port_for_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(fabric: Fabric, sent: list[m.Message], beater: Any) -> None:
        fabric.take(offer())
        beater().hear(words.Loaded(MINE))
        fabric.take(m.FabricPort(55, *PORT))
        sent.clear()
        beater().gone("killed by SIGKILL")
        assert sent == [m.FabricEnded(55, "its MPI beater was lost (killed by SIGKILL)")]
        fabric.take(m.FabricPort(56, *PORT))
        assert sent[-1] == m.FabricEnded(56, "its MPI beater is being replaced")
        assert len(beater().told) == 1

    play(monkeypatch, act)


def test_a_node_without_mpi_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(fabric: Fabric, sent: list[m.Message], beater: Any) -> None:
        fabric.take(offer())
        beater().hear(words.Unusable("mpi4py is not installed"))
        assert sent == [m.FabricReady(1, problem="mpi4py is not installed")]

    play(monkeypatch, act)
