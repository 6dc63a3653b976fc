"""Probes between real UDP sockets: who gets an answer, and what "could not look" is."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from flashrec.agent import probe as module
from flashrec.agent.probe import DATAGRAM_BYTES, MAX_LOOKS, ProbePort, Prober
from flashrec.wire import messages as m

SECRET, OTHER_SECRET = b"s" * 32, b"o" * 32
HOST, LIMIT_S, PATIENCE_S = "127.0.0.1", 15, 5.0  # a look that is answered ends long before its time is over
SHORT_S = 0.3
LIFE = ("n3", 2)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))


@contextlib.contextmanager
def port(life: tuple[str, int] | None = None, secret: bytes = SECRET, host: str = HOST) -> Iterator[ProbePort]:
    made = ProbePort(secret, host, lambda: life)
    try:
        yield made
    finally:
        made.close()


class Relay:
    """A lossy network: two-way, between anybody and one place. passed, dropped: numbers of datagrams."""

    def __init__(self, place: tuple[str, int], loss: float, seed: int) -> None:
        self.place, self.loss, self.random = place, loss, random.Random(seed)
        self.inside, self.outside = socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)
        self.passed, self.dropped, self.sender = 0, 0, ("", 0)
        for sock in (self.inside, self.outside):
            sock.setblocking(False)
            sock.bind((HOST, 0))
            asyncio.get_running_loop().add_reader(sock, self.forward, sock)

    def forward(self, sock: socket.socket) -> None:
        datagram, sender = sock.recvfrom(2048)
        if sock is self.outside:
            self.sender = sender
        if self.random.random() < self.loss:
            self.dropped += 1
            return
        self.passed += 1
        to, place = (self.inside, self.place) if sock is self.outside else (self.outside, self.sender)
        to.sendto(datagram, place)

    def close(self) -> None:
        for sock in (self.inside, self.outside):
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()


def test_a_node_that_lives_is_reached() -> None:
    async def scene() -> None:
        with port(LIFE) as there, port() as here:
            assert await here.look(there.place, LIFE, PATIENCE_S) == (True, "")

    play(scene)


@pytest.mark.parametrize(
    ("life", "secret"),
    [
        (("n3", 1), SECRET),
        (("n3", 3), SECRET),
        (("n4", 2), SECRET),
        (None, SECRET),
        (LIFE, OTHER_SECRET),
    ],
    ids=["a former life", "a later life", "another node", "not admitted yet", "another job"],
)
def test_anybody_else_does_not_answer(life: tuple[str, int] | None, secret: bytes) -> None:
    async def scene() -> None:
        with port(life, secret) as there, port() as here:
            said: list[bytes] = []
            here._hear, hear = lambda datagram, sender: (said.append(datagram), hear(datagram, sender)), here._hear  # type: ignore[method-assign]
            assert await here.look(there.place, LIFE, SHORT_S) == (False, "")
            assert said == [], "not even in vain: a stranger is told nothing"

    play(scene)


def test_a_forged_answer_is_none() -> None:
    """Somebody who hears the question but has not the secret answers with the right nonce."""

    async def scene() -> None:
        with port(secret=OTHER_SECRET) as here, port(secret=SECRET) as forger:
            forged = 0

            def forge(datagram: bytes, sender: Any) -> None:
                nonlocal forged
                forged += 1
                forger._socket.sendto(b"FRP!" + datagram[4:20] + forger._mac(b"FRP!", datagram[4:20], LIFE), sender)

            forger._hear = forge  # type: ignore[method-assign]
            assert await here.look(forger.place, LIFE, SHORT_S) == (False, "")
            assert forged

    play(scene)


def test_garbage_is_dropped_and_an_answer_is_not_longer_than_its_question() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        with port(LIFE) as there, port(LIFE) as asker, socket.socket(type=socket.SOCK_DGRAM) as stranger:
            stranger.setblocking(False)
            stranger.bind((HOST, 0))
            for garbage in (b"", b"FRP?", b"FRP?" + bytes(48), b"x" * DATAGRAM_BYTES, b"FRP!" + bytes(48), bytes(1500)):
                stranger.sendto(garbage, there.place)
            question = b"FRP?" + b"n" * 16 + asker._mac(b"FRP?", b"n" * 16, LIFE)
            stranger.sendto(question + b"x", there.place)
            stranger.sendto(question, there.place)
            answer = await loop.sock_recv(stranger, 2048)
            assert len(answer) == len(question) == DATAGRAM_BYTES
            assert answer[:4] == b"FRP!"
            with pytest.raises(BlockingIOError):
                stranger.recv(2048)

    play(scene)


def test_an_answer_may_come_twice() -> None:
    """Networks duplicate, and a slow node answers several questions at once."""

    async def scene() -> None:
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        with port(LIFE) as there, port() as here:
            hear = there._hear

            def twice(datagram: bytes, sender: Any) -> None:
                hear(datagram, sender)
                hear(datagram, sender)

            there._hear = twice  # type: ignore[method-assign]
            assert await here.look(there.place, LIFE, PATIENCE_S) == (True, "")
            await asyncio.sleep(0.01)
        assert problems == []

    play(scene)


def test_loss_does_not_look_like_death() -> None:
    """30 % of all datagrams are lost, in either direction."""

    async def scene() -> None:
        with port(LIFE) as there, port() as here:
            relay = Relay(there.place, loss=0.3, seed=7)
            try:
                looks = [await here.look(relay.outside.getsockname(), LIFE, 1.0) for _ in range(12)]
            finally:
                relay.close()
            assert relay.dropped > 3, "the loss was real"
            assert [reached for reached, _ in looks].count(True) >= 10

    play(scene)


def test_who_cannot_send_could_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """No route from here: that is nothing about the other node."""

    async def scene() -> None:
        with port(host="127.0.0.1") as here:
            reached, said = await here.look(("8.8.8.8", 9), LIFE, SHORT_S)  # from a loopback address nothing leaves
            assert reached is None and said

    play(scene)


def test_what_is_kept_is_bounded() -> None:
    async def scene() -> None:
        with port() as here, socket.socket(type=socket.SOCK_DGRAM) as mute:
            mute.bind((HOST, 0))
            looks = [asyncio.create_task(here.look(mute.getsockname(), LIFE, SHORT_S)) for _ in range(MAX_LOOKS + 6)]
            results = [await look for look in looks]
            assert [reached for reached, _ in results].count(None) == 6
            assert results[-1] == (None, f"{MAX_LOOKS} looks are under way")
            assert not here._awaited

    play(scene)


class Agents:
    """The probers of two nodes, with what each tells the manager."""

    def __init__(self) -> None:
        self.said: dict[str, list[m.Message]] = {"n1": [], "n3": []}
        self.n1 = Prober(SECRET, "n1", self.said["n1"].append)
        self.n3 = Prober(SECRET, "n3", self.said["n3"].append)

    def place(self, path: str) -> tuple[str, int]:
        offered = [said for said in self.said["n3"] if isinstance(said, m.ProbesOffered)]
        return offered[-1].places[path]

    async def ask(self, path: str, number: int = 1) -> m.Message:
        self.n1.ask(m.ProbeAsked(number, "n3", 2, path, *self.place(path), SHORT_S))
        while not any(isinstance(said, m.ProbeAnswered) and said.number == number for said in self.said["n1"]):
            await asyncio.sleep(0.005)
        return self.said["n1"][-1]


def test_a_prober_answers_the_manager_on_each_path(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        both = Agents()
        both.n1.welcomed(1, HOST)
        both.n3.welcomed(2, HOST)
        assert await both.ask("control", 1) == m.ProbeAnswered(1, "n3", "control", True)
        both.n3.offer("fabric", "127.0.0.2")
        assert both.place("control")[0] == HOST, "the other path is still offered"
        assert await both.ask("fabric", 2) == m.ProbeAnswered(2, "n3", "fabric", None, "no address on the fabric path")
        both.n1.offer("fabric", "127.0.0.3")
        assert await both.ask("fabric", 3) == m.ProbeAnswered(3, "n3", "fabric", True)
        both.n3.close()
        assert await both.ask("fabric", 4) == m.ProbeAnswered(4, "n3", "fabric", False)
        both.n1.close()

    play(scene)


def test_an_address_that_is_not_ours_is_not_offered() -> None:
    async def scene() -> None:
        both = Agents()
        both.n3.welcomed(2, HOST)
        both.n3.offer("fabric", "192.0.2.1")
        assert set(both.said["n3"][-1].places) == {"control"}  # type: ignore[union-attr]
        both.n3.offer("fabric", "localhost")  # a name: asking a name server may block for long
        assert set(both.said["n3"][-1].places) == {"control"}  # type: ignore[union-attr]
        both.n3.close()

    play(scene)


def test_a_port_that_closes_under_a_look_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_DATAGRAMS", 1)

    async def scene() -> None:
        with socket.socket(type=socket.SOCK_DGRAM) as mute:
            mute.bind((HOST, 0))
            here = ProbePort(SECRET, HOST, lambda: None)
            look = asyncio.create_task(here.look(mute.getsockname(), LIFE, PATIENCE_S))
            await asyncio.sleep(0.02)
            here.close()
            assert await look == (None, "the port was closed")

    play(scene)
