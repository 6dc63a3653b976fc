"""The control plane on a real listener: who is admitted, whose words count, how a life ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import flashrec
from flashrec.core import events as e
from flashrec.core.detection import Detector
from flashrec.core.limits import Timing
from flashrec.core.lives import Verdict
from flashrec.manager import control as module
from flashrec.manager.control import ControlPlane
from flashrec.manager.rendezvous import Rendezvous
from flashrec.transport.stream import Channel, connect_tcp, listen_tcp
from flashrec.wire import frames
from flashrec.wire import messages as m

SECRET = b"s" * 32
LIMIT_S = 15


class Desk:
    """The manager's side: what the control plane tells it."""

    def __init__(self) -> None:
        self.detector = Detector(Timing())
        self.rendezvous = Rendezvous({0: ("n1",), 1: ("n2",)}.__getitem__)
        self.rendezvous.begin(1)
        self.events: list[e.AnyEvent] = []
        self.verdicts: list[Verdict] = []
        self.notes: list[dict[str, Any]] = []
        self.plane = ControlPlane(
            ("n1", "n2"), self.detector, self.rendezvous, self.welcome, self.events.extend, self.judge, self.note
        )
        self.port = 0

    def welcome(self, incarnation: int) -> m.AgentWelcome:
        return m.AgentWelcome(incarnation, 1, 2, 0.25, 10.0, 30.0, 1.0, "/logs", {})

    def judge(self, verdicts: list[Verdict]) -> None:
        self.verdicts += verdicts
        for verdict in verdicts:
            if verdict.state == "dead":
                self.plane.cut(verdict.node, verdict.reason)

    def note(self, what: str, **fields: Any) -> None:
        self.notes.append({"what": what, **fields})

    async def agent(
        self, node: str, launch: int = 1, version: str = flashrec.__version__
    ) -> tuple[Channel[m.ToAgent], m.ToAgent | None]:
        """Connect as an agent; return the channel and the first answer."""
        channel = await connect_tcp("127.0.0.1", self.port, SECRET, frames.to_agent)
        channel.send(m.AgentHello(node, launch, 1, "127.0.0.1", version))
        return channel, await heard(channel)


ITERATORS: dict[int, Any] = {}


async def heard(channel: Channel[m.ToAgent]) -> m.ToAgent | None:
    """The next message; None at the end of the connection."""
    messages = ITERATORS.setdefault(id(channel), channel.messages())
    return await anext(messages, None)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def play(scene: Callable[[Desk], Awaitable[None]]) -> None:
    async def run() -> None:
        desk = Desk()
        server = await listen_tcp("127.0.0.1", 0, SECRET, frames.to_manager, desk.plane.serve, desk.plane.refused)
        desk.port = server.sockets[0].getsockname()[1]
        await scene(desk)
        server.close()
        for link in list(desk.plane.links.values()):
            link.channel.abort("over")
        ITERATORS.clear()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_an_agent_is_welcomed_and_heard() -> None:
    async def scene(desk: Desk) -> None:
        channel, answer = await desk.agent("n1")
        assert answer == desk.welcome(1)
        assert desk.events == [e.AgentJoined("n1", 1)]
        channel.send(m.AgentHeartbeat(1, 7, (m.WorkerBeat(0, 1, 5, 4, 4, "step"),)))
        assert await heard(channel) == m.HeartbeatAck(7)
        assert desk.plane.tags[0].v == 5
        channel.send(e.WorkerJoined(0, 1))
        await until(lambda: len(desk.events) == 2)
        channel.abort("killed")
        await until(lambda: desk.verdicts)
        assert (desk.verdicts[0].node, desk.verdicts[0].state) == ("n1", "dead")
        assert "control connection ended" in desk.verdicts[0].reason
        assert "n1" not in desk.plane.links

    play(scene)


@pytest.mark.parametrize(
    ("node", "version", "said"),
    [("n9", flashrec.__version__, "not part of this job"), ("n1", "9.9", "install the same on all")],
)
def test_who_is_refused(node: str, version: str, said: str) -> None:
    async def scene(desk: Desk) -> None:
        channel, answer = await desk.agent(node, version=version)
        assert isinstance(answer, m.AgentRefused)
        assert said in answer.reason
        assert await heard(channel) is None
        assert desk.events == []
        assert desk.notes[0]["what"] == "agent refused"

    play(scene)


def test_a_successor_that_waits_has_no_tag() -> None:
    """Two lives of a rank beat in a planned swap: whoever judges progress must see the one that trains."""

    async def scene(desk: Desk) -> None:
        told: list[m.WorkerBeat] = []
        desk.plane.acts = lambda rank, incarnation: (rank, incarnation) == (0, 1)
        desk.plane.hear_tags = lambda tags, now: told.extend(tags)
        channel, _ = await desk.agent("n1")
        training, waiting = m.WorkerBeat(0, 1, 5, 4, 4, "step"), m.WorkerBeat(0, 2, -1, -1, -1, "recovery")
        channel.send(m.AgentHeartbeat(1, 7, (training, waiting)))
        assert await heard(channel) == m.HeartbeatAck(7)
        assert desk.plane.tags == {0: training} and told == [training]

    play(scene)


def test_a_second_agent_of_a_node_is_refused_and_the_first_one_stays() -> None:
    async def scene(desk: Desk) -> None:
        first, _ = await desk.agent("n1", launch=1)
        _, answer = await desk.agent("n1", launch=2)
        assert answer == m.AgentRefused("node n1 has an agent already")
        first.send(m.AgentHeartbeat(1, 1))
        assert await heard(first) == m.HeartbeatAck(1)
        assert desk.verdicts == []

    play(scene)


def test_the_same_agent_that_comes_again_is_a_new_life_and_its_former_one_has_no_voice() -> None:
    async def scene(desk: Desk) -> None:
        first, _ = await desk.agent("n1")
        _, answer = await desk.agent("n1")
        assert isinstance(answer, m.AgentWelcome) and answer.incarnation == 2
        assert [(v.incarnation, v.state) for v in desk.verdicts] == [(1, "dead")]
        first.send(e.WorkerJoined(0, 1))
        assert await heard(first) is None
        assert desk.events == [e.AgentJoined("n1", 1), e.AgentJoined("n1", 2)]
        assert desk.detector.state_of("n1") == "alive"

    play(scene)


def test_a_suspect_makes_room_for_a_new_agent() -> None:
    async def scene(desk: Desk) -> None:
        await desk.agent("n1", launch=1)
        now = asyncio.get_running_loop().time() + 1.5
        desk.verdicts += desk.detector.tick(now).verdicts
        assert desk.detector.state_of("n1") == "suspect"
        _, answer = await desk.agent("n1", launch=2)
        assert isinstance(answer, m.AgentWelcome) and answer.incarnation == 2

    play(scene)


def test_a_condemned_life_is_cut_off_at_once() -> None:
    async def scene(desk: Desk) -> None:
        channel, _ = await desk.agent("n1")
        desk.judge(desk.detector.slurm_said("n1", frozenset({"DOWN"})))
        channel.send(e.WorkerJoined(0, 1))
        assert await heard(channel) is None
        assert desk.events == [e.AgentJoined("n1", 1)]
        desk.plane.send("n1", m.Resume(1))  # nobody is there: nothing happens
        assert len(desk.verdicts) == 1

    play(scene)


def test_a_node_that_slurm_has_taken_is_not_admitted_until_slurm_gives_it_back() -> None:
    """Its agent lives on for a while and would come back as a spare again and again."""

    async def scene(desk: Desk) -> None:
        desk.plane.bar("n1", "Slurm says DOWN")
        _, answer = await desk.agent("n1")
        assert answer == m.AgentRefused("node n1 is not usable: Slurm says DOWN")
        desk.plane.bar("n1", "")
        _, answer = await desk.agent("n1")
        assert isinstance(answer, m.AgentWelcome)

    play(scene)


def test_whoever_comes_after_the_end_is_sent_away() -> None:
    async def scene(desk: Desk) -> None:
        there, _ = await desk.agent("n1")
        desk.plane.close(m.Stop("all ranks have finished"))
        assert await heard(there) == m.Stop("all ranks have finished")
        _, answer = await desk.agent("n2")
        assert answer == m.AgentRefused("the job is over: all ranks have finished")

    play(scene)


@pytest.mark.parametrize("first", [m.AgentHeartbeat(1, 1), e.WorkerJoined(0, 1), None])
def test_hello_comes_first(first: m.Message | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 0.05)

    async def scene(desk: Desk) -> None:
        channel = await connect_tcp("127.0.0.1", desk.port, SECRET, frames.to_agent)
        if first is not None:
            channel.send(first)
        assert await heard(channel) is None
        await until(lambda: desk.notes)
        assert desk.notes[0]["what"] == "connection refused"
        assert "no hello" in desk.notes[0]["why"]
        assert desk.events == []

    play(scene)


def test_keys_and_counters_go_through_the_rendezvous() -> None:
    async def scene(desk: Desk) -> None:
        one, _ = await desk.agent("n1")
        two, _ = await desk.agent("n2")
        for key in ("a", "b"):
            one.send(m.KeyPosted(0, 1, 1, "world", key, b"v", (0, 1)))
        got: dict[str, bytes] = {}
        while len(got) < 2:
            keys = await heard(two)
            assert isinstance(keys, m.KeysPushed) and keys.members == (0, 1)
            got |= keys.items
        assert got == {"a": b"v", "b": b"v"}
        while len(got) > 0:  # rank 0 is a member, too
            keys = await heard(one)
            assert isinstance(keys, m.KeysPushed)
            got = {key: value for key, value in got.items() if key not in keys.items}
        for amount, total in ((2, 2), (3, 5)):
            one.send(m.CounterAdded(0, 1, 1, "world", "c", amount, 9))
            assert await heard(one) == m.CounterValue(0, 1, 9, total)

    play(scene)


def test_what_a_life_said_before_it_was_cut_off_is_not_heard_after() -> None:
    """Both messages came in one packet; carrying out the first one condemned the node."""

    async def scene(desk: Desk) -> None:
        channel, _ = await desk.agent("n1")
        desk.plane._emit = lambda events: (desk.events.extend(events), desk.plane.cut("n1", "condemned"))[0]
        both = [frames.frame(frames.encode(e.WorkerJoined(rank, 1))) for rank in (0, 1)]
        channel._writer.write(b"".join(both))
        assert await heard(channel) is None
        assert desk.events == [e.AgentJoined("n1", 1), e.WorkerJoined(0, 1)]

    play(scene)


def test_a_node_from_a_pool_is_admitted_while_it_is_the_jobs() -> None:
    async def scene(desk: Desk) -> None:
        _, answer = await desk.agent("p1")
        assert isinstance(answer, m.AgentRefused) and "not part of this job" in answer.reason
        desk.plane.bar("p1", "Slurm says DOWN")  # some former life of it
        desk.plane.include("p1")
        channel, answer = await desk.agent("p1")
        assert isinstance(answer, m.AgentWelcome)
        desk.plane.exclude("p1", "given back")
        assert await heard(channel) is None, "its agent is let go"
        assert [(v.node, v.state) for v in desk.verdicts] == [("p1", "left")], "and nobody is blamed"
        _, answer = await desk.agent("p1")
        assert isinstance(answer, m.AgentRefused)
        desk.plane.include("p1")
        _, answer = await desk.agent("p1")
        assert isinstance(answer, m.AgentWelcome) and answer.incarnation == 2

    play(scene)


def test_what_workers_said_together_is_heard_in_order() -> None:
    async def scene(desk: Desk) -> None:
        one, _ = await desk.agent("n1")
        said = tuple(e.WorkerFormed(rank, 1, 1) for rank in range(8))
        one.send(m.Relayed(said))
        await until(lambda: len(desk.events) >= 9)
        assert tuple(desk.events[1:]) == said

    play(scene)


def test_words_between_two_others_are_taken_as_one_and_in_their_place() -> None:
    async def scene(desk: Desk) -> None:
        one, _ = await desk.agent("n1")
        told: list[Any] = []
        post, flush = desk.rendezvous.post, desk.rendezvous.flush
        desk.plane._emit = lambda events: told.append([event.rank for event in events])
        desk.rendezvous.post = lambda posted: (told.append(posted.key), post(posted))[1]  # type: ignore[method-assign]
        desk.rendezvous.flush = lambda: (told.append("flushed"), flush())[1]  # type: ignore[method-assign]
        words = [e.WorkerFormed(rank, 1, 1) for rank in range(3)]
        keys = [m.KeyPosted(0, 1, 1, "world", key, b"v", (0, 1)) for key in ("a", "b")]
        one.send(m.Relayed((words[0], words[1], *keys, words[2])))
        await until(lambda: "flushed" in told)
        assert told == [[0, 1], "a", "b", [2], "flushed"]
        await asyncio.sleep(0.01)
        told.clear()
        one.send(m.Relayed((*keys, *keys)))
        await until(lambda: "flushed" in told)
        await asyncio.sleep(0.01)
        assert told == ["a", "b", "a", "b", "flushed"], "where no rank has said a word, the machine is told of none"

    play(scene)


def test_a_message_for_all_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[m.Message] = []

    def framed(message: m.Message) -> bytes:
        encoded.append(message)
        return frames.framed(message)

    async def scene(desk: Desk) -> None:
        both = [(await desk.agent(node))[0] for node in ("n1", "n2")]
        monkeypatch.setattr(module, "framed", framed)
        desk.plane.broadcast(m.Resume(4))
        assert [await heard(channel) for channel in both] == [m.Resume(4), m.Resume(4)]
        assert encoded == [m.Resume(4)]

    play(scene)


def test_an_agent_is_told_now_and_then_that_it_is_heard() -> None:
    async def scene(desk: Desk) -> None:
        desk.plane.ack_interval_s = 1000.0
        one, _ = await desk.agent("n1")
        for sequence in range(20):
            one.send(m.AgentHeartbeat(1, sequence))
        one.send(m.CounterAdded(0, 1, 1, "world", "c", 1, 9))
        assert await heard(one) == m.HeartbeatAck(0)
        assert await heard(one) == m.CounterValue(0, 1, 9, 1), "no second one so soon"
        desk.plane.links["n1"].ack_at = 0.0
        one.send(m.AgentHeartbeat(1, 20))
        assert await heard(one) == m.HeartbeatAck(20)

    play(scene)


def test_who_has_an_address_is_known_as_links_come_and_go() -> None:
    async def scene(desk: Desk) -> None:
        await desk.agent("n1")
        assert desk.plane.nodes_at("127.0.0.1") == ["n1"]
        await desk.agent("n2")
        assert desk.plane.nodes_at("127.0.0.1") == ["n1", "n2"]
        desk.plane.cut("n1", "condemned")
        assert desk.plane.nodes_at("127.0.0.1") == ["n2"]
        assert desk.plane.nodes_at("10.0.0.1") == []

    play(scene)
