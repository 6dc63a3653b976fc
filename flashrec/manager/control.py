"""The manager's side of the control connections: one link per node, messages in, events out.

A link is one life of an agent. It ends with its connection; the detector then says so, with the reason. A message
is turned into an event only while its link is the current one of its node, so a former life has no voice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

import flashrec
from flashrec.core import events as e
from flashrec.core.detection import Detector
from flashrec.core.lives import Verdict
from flashrec.manager.rendezvous import Rendezvous
from flashrec.transport.stream import Channel
from flashrec.wire import messages as m
from flashrec.wire.frames import framed

HELLO_TIMEOUT_S = 10.0


class Link(msgspec.Struct):
    """The current life of the agent on one node."""

    node: str
    incarnation: int
    launch: int
    address: str
    channel: Channel[m.ToManager]
    ack_at: float = 0.0  # when the next heartbeat is acknowledged
    probe_places: dict[str, tuple[str, int]] = {}  # path -> where it answers probes


class ControlPlane:
    """nodes: the job's nodes. welcome(incarnation) builds the first answer. emit takes events that were said together,
    judge takes verdicts."""

    def __init__(
        self,
        nodes: Iterable[str],
        detector: Detector,
        rendezvous: Rendezvous,
        welcome: Callable[[int], m.AgentWelcome],
        emit: Callable[[Sequence[e.AnyEvent]], None],
        judge: Callable[[list[Verdict]], None],
        note: Callable[..., None],
    ) -> None:
        self._nodes, self._detector, self._rendezvous = set(nodes), detector, rendezvous
        self._welcome, self._emit, self._judge, self._note = welcome, emit, judge, note
        self._incarnations: dict[str, int] = {}
        self._barred: dict[str, str] = {}
        self._closed = ""
        self._hearers: dict[type, Callable[[Link, Any], None]] = {}
        self.links: dict[str, Link] = {}
        self._nodes_at: dict[str, list[str]] | None = None  # by address; None: links have changed
        self.tags: dict[int, m.WorkerBeat] = {}
        self.acts: Callable[[int, int], bool] = lambda rank, incarnation: True  # not a successor that only waits
        self.ack_interval_s = 0.0  # 0: every heartbeat
        self.hear_tags: Callable[[tuple[m.WorkerBeat, ...], float], None] = lambda tags, now: None
        self.hear_fabric: Callable[[Link, m.ToManager], None] = lambda link, message: None  # heartbeats over MPI

    def send(self, node: str, message: m.Message) -> None:
        """To one node's agent; nothing happens if it has none (the detector will have said why)."""
        link = self.links.get(node)
        if link is not None:
            link.channel.send(message)

    def on(self, kind: type[m.Message], hear: Callable[[Link, Any], None]) -> None:
        """Give messages of this kind, with the link they came over, to somebody who knows what they mean."""
        self._hearers[kind] = hear

    def broadcast(self, message: m.Message) -> None:
        self.send_all(self.links, message)

    def send_all(self, nodes: Iterable[str], *messages: m.Message) -> None:
        """The same to many: encoded once, and sent together."""
        data = b"".join(map(framed, messages))
        for node in nodes:
            link = self.links.get(node)
            if link is not None:
                link.channel.send_framed(data)

    def nodes_at(self, address: str) -> list[str]:
        """Nodes whose agents have this address."""
        if self._nodes_at is None:
            self._nodes_at = {}
            for link in self.links.values():
                self._nodes_at.setdefault(link.address, []).append(link.node)
        return self._nodes_at.get(address, [])

    def probe_place(self, node: str, path: str) -> tuple[str, int] | None:
        """(host, port) where the agent of `node` answers other agents' probes on this path; None: nowhere (yet)."""
        link = self.links.get(node)
        return None if link is None else link.probe_places.get(path)

    def cut(self, node: str, reason: str) -> None:
        """End the current life of a node's agent: it was condemned. If it still lives it comes back as a new one."""
        link = self._forget(node)
        if link is not None:
            link.channel.abort(reason)

    def include(self, node: str) -> None:
        """A node has come into the job."""
        self._nodes.add(node)
        self._barred.pop(node, None)

    def exclude(self, node: str, reason: str) -> None:
        """A node is not the job's any more."""
        self._nodes.discard(node)
        self.cut(node, reason)
        self._judge(self._detector.left(node))

    def bar(self, node: str, why: str) -> None:
        """Admit no agent of this node while `why` is not '': Slurm has taken the node, whatever still runs on it."""
        self._barred[node] = why

    def close(self, stop: m.Stop) -> None:
        """The job is over: tell every agent, also those that come back only now."""
        self._closed = f"the job is over: {stop.reason}"
        self.broadcast(stop)

    def refused(self, why: str) -> None:
        """Somebody could not prove the job secret."""
        self._note("connection refused", why=why)

    async def serve(self, channel: Channel[m.ToManager]) -> None:
        """One admitted connection, from hello to its end."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await channel.receive()
        except TimeoutError:
            hello = None
        if not isinstance(hello, m.AgentHello):
            self.refused(f"{channel.name}: no hello ({channel.end_reason or 'another message came first'})")
            return
        objection = self._objection(hello)
        if objection:
            self._note("agent refused", node=hello.node, launch=hello.launch, why=objection)
            channel.send(m.AgentRefused(objection))
            await channel.drain_and_close()
            return
        link = self._admit(hello, channel)
        await channel.listen(lambda message: self._hear(link, message))
        if self.links.get(link.node) is link:
            self._judge(self._detector.disconnected(link.node, link.incarnation, channel.end_reason))
            self._forget(link.node)

    def _forget(self, node: str) -> Link | None:
        self._nodes_at = None
        return self.links.pop(node, None)

    def _objection(self, hello: m.AgentHello) -> str:
        if self._closed:
            return self._closed
        if self._barred.get(hello.node):
            return f"node {hello.node} is not usable: {self._barred[hello.node]}"
        if hello.node not in self._nodes:
            return f"node {hello.node} is not part of this job"
        if hello.version != flashrec.__version__:
            return (
                f"the agent has flashrec {hello.version}, the manager {flashrec.__version__}: install the same on all"
            )
        current = self.links.get(hello.node)
        if current is not None and self._detector.state_of(hello.node) == "alive" and hello.launch != current.launch:
            return f"node {hello.node} has an agent already"
        return ""

    def _admit(self, hello: m.AgentHello, channel: Channel[m.ToManager]) -> Link:
        former = self.links.get(hello.node)
        if former is not None:
            self._judge(self._detector.disconnected(former.node, former.incarnation, "a new life of the agent came"))
        incarnation = self._incarnations.get(hello.node, 0) + 1
        self._incarnations[hello.node] = incarnation
        link = Link(hello.node, incarnation, hello.launch, hello.address, channel)
        self.links[hello.node], self._nodes_at = link, None
        self._detector.joined(hello.node, incarnation, time.monotonic())
        channel.send(self._welcome(incarnation))
        self._emit((e.AgentJoined(hello.node, incarnation),))
        return link

    def _hear(self, link: Link, message: m.ToManager) -> None:
        if self.links.get(link.node) is not link:
            link.channel.abort("another life of the agent has taken over")
            return
        now = time.monotonic()
        alive = self._detector.heard(link.node, link.incarnation, now)
        if alive:
            self._judge(alive)
        if isinstance(message, m.Relayed):
            self._take_all(link, message.said, now)
        else:
            self._take(link, message, now)

    def _take_all(self, link: Link, said: Iterable[m.FromWorkers], now: float) -> None:
        events: list[e.AnyEvent] = []
        for one in said:
            if isinstance(one, e.Event):  # as good as all
                events.append(one)
                continue
            if events:
                self._emit(events)
                events = []
            self._take(link, one, now)
        if events:
            self._emit(events)

    def _take(self, link: Link, message: m.ToManager, now: float) -> None:
        match message:
            case m.AgentHeartbeat():
                if now >= link.ack_at:
                    link.ack_at = now + self.ack_interval_s
                    link.channel.send(m.HeartbeatAck(message.sequence))
                acts, known = self.acts, self.tags
                tags = tuple(tag for tag in message.tags if acts(tag.rank, tag.incarnation))
                for tag in tags:
                    known[tag.rank] = tag
                if tags:
                    self.hear_tags(tags, now)
                self.hear_fabric(link, message)
            case m.FabricReady() | m.FabricGoing() | m.FabricEnded():
                self.hear_fabric(link, message)
            case m.ProbesOffered():
                link.probe_places = message.places
            case m.ProbeAnswered():
                self._note("probe answered", number=message.number, by=link.node, node=message.node, path=message.path,
                           reached=message.reached, said=message.said)  # fmt: skip
                self._detector.probed(message.number, link.node, message.node, message.reached)
            case m.KeyPosted():
                if self._rendezvous.post(message):
                    asyncio.get_running_loop().call_soon(self._flush_keys)
            case m.CounterAdded():
                value = self._rendezvous.add(message)
                if value is not None:
                    link.channel.send(value)
            case e.Event():
                self._emit((message,))
            case _ if (hear := self._hearers.get(type(message))) is not None:
                hear(link, message)

    def _flush_keys(self) -> None:
        for nodes, keys in self._rendezvous.flush():
            self.send_all(nodes, *keys)
