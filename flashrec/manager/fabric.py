"""The manager's side of the heartbeats over MPI: keeps the hub, brings each agent's beater and the hub together, and
tells the detector who is heard on the fabric. It takes no decision, and whatever libmpi does, the job goes on.

Per node, in this order; back to the first with a fresh beater, later and later, when an attempt or a session ends:

    offered   the agent was told of the hub            until it says what its beater is (FabricReady)
    ready     waits for a port; MAX_MEETING at a time
    asked     has a port                               until its beater is in Connect (FabricGoing)
    meeting   the hub is told to accept                until the first heartbeat
    up        its heartbeats come
    apart     will be offered the hub again at `retry_at`
    useless   its MPI cannot be used; its agent must come back as a new life to be asked again

Silence of a beater counts only while its agent says that it sends: a beater that is stopped or starved is no lost link.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Protocol

import msgspec

from flashrec.config.schema import Fabric as Settings
from flashrec.core.lives import Verdict
from flashrec.manager.control import Link
from flashrec.manager.voice import say
from flashrec.transport.mpi import words
from flashrec.transport.mpi.supervisor import Supervisor
from flashrec.transport.mpi.words import Accepted, Beats, Ended, FromChild, Loaded, Means, Unusable
from flashrec.wire import messages as m

MAX_MEETING = 4  # a beater waits in Connect for CONNECT_TIMEOUT_S at most, others may go first
LOOK_S = 0.1
BLIND_S = 0.5  # the hub was silent, or held by one beater, for so long: nobody is to blame
ANSWER_TIMEOUT_S = 60.0  # loading libmpi on a node
ATTEMPT_TIMEOUT_S = 6.0
MIN_RETRY_S, MAX_RETRY_S = 0.5, 30.0
SILENT_S = 15.0  # then a fresh session is tried: TCP waits longer and longer between its own tries
MANY_FAILURES = 3  # of one node in a row: it is not bad luck
SETTLED_S = 20.0  # after so long without all nodes it is said which are missing
_NOT_UP = ("offered", "ready", "asked", "meeting", "apart")


class Watch(Protocol):
    """What is told to the detector (`core.detection`)."""

    def heard(self, node: str, incarnation: int, now: float, path: str) -> list[Verdict]: ...

    def fabric_up(self, node: str, incarnation: int, now: float) -> list[Verdict]: ...

    def fabric_down(self, node: str, incarnation: int, reason: str, now: float) -> list[Verdict]: ...

    def blind(self, path: str, now: float, reason: str) -> list[Verdict]: ...


class FabricError(Exception):
    """fabric.mpi is `required`, and it cannot be had; the message says why."""


class Peer(msgspec.Struct):
    """One life of an agent. heard_at: the newest heartbeat over MPI; sent: as its agent said at `said_at`."""

    node: str
    incarnation: int
    state: str = "apart"
    since: float = 0.0
    session: int = 0
    port: str = ""
    means: Means | None = None
    problem: str = ""
    failures: int = 0
    retry_at: float = 0.0
    is_watched: bool = False
    received: int = 0
    heard_at: float = 0.0
    sent: int = 0
    said_at: float = 0.0


class Fabric:
    """links: the current life of each node's agent (`ControlPlane.links`). refuse(reason): the fabric is `required` and
    cannot be had, so the job must not run. address: ours towards the agents."""

    def __init__(
        self, settings: Settings, address: str, links: Mapping[str, Link], watch: Watch,
        send: Callable[[str, m.Message], None], judge: Callable[[list[Verdict]], None], note: Callable[..., None],
        refuse: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._settings, self._links, self._watch = settings, links, watch
        self._send, self._judge, self._note, self._refuse = send, judge, note, refuse
        self._hub = Supervisor("hub", self._for_child(_ipv4(address)), self._hear, self._gone)
        self._means: Means | None = None
        self._ports: tuple[str, ...] = ()
        self._num_ports = 0
        self._peers: dict[str, Peer] = {}
        self._sessions: dict[int, Peer] = {}
        self._answered = asyncio.Event()
        self._problem = ""
        self._first_at: float | None = None
        self._is_announced = self._is_complete = False

    # ---- the life of the hub ------------------------------------------------------------------------------------

    async def usable(self) -> None:
        """Wait until the hub has loaded its library. Raises FabricError if it cannot (`run` must be running)."""
        await self._answered.wait()
        if self._problem:
            raise FabricError(self._problem)

    async def run(self) -> None:
        """Until cancelled; no MPI process is left then."""
        hub = asyncio.create_task(self._hub.run())
        try:
            while not self._problem:
                await asyncio.sleep(LOOK_S)
                self._look(monotonic())
        finally:
            hub.cancel()
            await asyncio.wait([hub])

    def _for_child(self, address: str) -> words.Settings:
        s = self._settings
        return words.Settings(s.provider, s.interface, address, s.library, s.port_range, s.heartbeat_interval_s)

    def _hear(self, word: FromChild) -> None:
        now = monotonic()
        match word:
            case Loaded():
                self._means, self._ports = word.means, word.ports
                self._answered.set()
                self._note("fabric hub loaded", means=str(word.means), address=word.means.address, pid=self._hub.pid)
            case Unusable():
                self._problem = word.problem
                self._answered.set()
                self._note("fabric is not watched", why=word.problem)
                if self._settings.mpi != "required":
                    say(f"the fabric is not watched: {word.problem}")
            case Accepted():
                self._held(word.took_s, now)
            case Ended():
                self._held(word.took_s, now)
                self._part(self._sessions.get(word.session), word.reason, now)
            case Beats():
                for session, sequence in word.newest:
                    self._heard(self._sessions.get(session), sequence, now)

    def _gone(self, reason: str) -> None:
        """The hub has ended: all sessions have, and nobody is to blame but us."""
        now = monotonic()
        self._means = None
        self._note("fabric hub lost", why=reason)
        say(f"the MPI hub is replaced: {reason}")
        self._judge(self._watch.blind("fabric", now, f"our MPI hub was lost: {reason}"))
        for peer in self._peers.values():
            if peer.state != "useless":
                self._down(peer, "our MPI hub was lost", now)
                self._become(peer, "apart", now)
                peer.retry_at = now

    def _held(self, took_s: float, now: float) -> None:
        if took_s > BLIND_S:
            self._judge(self._watch.blind("fabric", now, f"one beater kept our MPI hub for {took_s:.2f} s"))

    # ---- what agents say ------------------------------------------------------------------------------------------

    def said(self, link: Link, message: m.ToManager) -> None:
        """A message of the current life of an agent; only those about the fabric matter."""
        peer, now = self._peers.get(link.node), monotonic()
        if peer is None or peer.incarnation != link.incarnation:
            return
        match message:
            case m.AgentHeartbeat():
                if message.fabric[0] == peer.session:
                    peer.sent, peer.said_at = message.fabric[1], now
            case m.FabricReady():
                if message.hub == self._hub.life and self._means is not None:
                    self._be_ready(peer, message, self._means, now)
            case m.FabricGoing():
                if peer.state == "asked" and message.session == peer.session:
                    self._become(peer, "meeting", now)
                    self._hub.say(words.Accept(peer.session, peer.incarnation, peer.port))
            case m.FabricEnded():
                if message.session == peer.session:
                    self._part(peer, message.reason, now)

    def _be_ready(self, peer: Peer, message: m.FabricReady, ours: Means, now: float) -> None:
        peer.means = Means(message.library, message.provider, message.interface, message.address)
        peer.problem = message.problem
        if not peer.problem and (message.library, message.provider) != (ours.library, ours.provider):
            peer.problem = (
                f"it has {peer.means} and the manager {ours}: they cannot meet; install the same on all nodes"
            )
        if not peer.problem:
            self._become(peer, "ready", now)
            return
        self._become(peer, "useless", now)
        self._note("fabric of a node is not watched", node=peer.node, why=peer.problem)
        if self._is_announced:
            say(f"the fabric is not watched on node {peer.node}: {peer.problem}")

    # ---- sessions -------------------------------------------------------------------------------------------------

    def _heard(self, peer: Peer | None, sequence: int, now: float) -> None:
        if peer is None:
            return
        peer.received, peer.heard_at = sequence, now
        if peer.state == "meeting":
            self._become(peer, "up", now)
            self._note("fabric session", node=peer.node, incarnation=peer.incarnation, means=str(peer.means))
        if peer.is_watched:
            self._judge(self._watch.heard(peer.node, peer.incarnation, now, "fabric"))
        else:
            peer.is_watched = True
            self._judge(self._watch.fabric_up(peer.node, peer.incarnation, now))

    def _down(self, peer: Peer, reason: str, now: float) -> None:
        if peer.is_watched:
            peer.is_watched = False
            self._judge(self._watch.fabric_down(peer.node, peer.incarnation, reason, now))

    def _part(self, peer: Peer | None, reason: str, now: float) -> None:
        """An attempt or a session has ended: once more, with a fresh beater, after a while."""
        if peer is None or peer.state not in ("asked", "meeting", "up"):
            return
        lasted = peer.state == "up" and now - peer.since > MAX_RETRY_S
        peer.failures = 1 if lasted else peer.failures + 1
        self._hub.say(words.Drop(peer.session))
        self._down(peer, reason, now)
        self._note("fabric session ended", node=peer.node, why=reason, was=peer.state, failures=peer.failures)
        if peer.state == "up" or peer.failures == MANY_FAILURES:
            say(f"no heartbeats over MPI from node {peer.node}, trying again: {reason}")
        peer.problem = reason
        self._become(peer, "apart", now)
        peer.retry_at = now + min(MIN_RETRY_S * 2 ** (peer.failures - 1), MAX_RETRY_S)

    def _become(self, peer: Peer, state: str, now: float) -> None:
        peer.state, peer.since = state, now
        if state in ("apart", "offered", "ready", "useless"):
            self._sessions.pop(peer.session, None)
            peer.session = 0
        if state in ("up", "ready"):
            peer.problem = ""

    def _look(self, now: float) -> None:
        """Everything that time and the agents' comings and goings ask for."""
        if self._means is None:
            if self._is_announced:
                self._judge(self._watch.blind("fabric", now, "our MPI hub was lost"))
        elif self._hub.silent_s > BLIND_S:
            self._judge(self._watch.blind("fabric", now, f"our MPI hub is silent for {self._hub.silent_s:.1f} s"))
        self._follow_links(now)
        for peer in self._peers.values():
            self._look_at(peer, now)
        meeting = sum(peer.state in ("asked", "meeting") for peer in self._peers.values())
        for peer in [peer for peer in self._peers.values() if peer.state == "ready"][: MAX_MEETING - meeting]:
            self._give_port(peer, now)
        self._announce(now)

    def _follow_links(self, now: float) -> None:
        for peer in list(self._peers.values()):
            link = self._links.get(peer.node)
            if link is None or link.incarnation != peer.incarnation:
                self._hub.say(words.Drop(peer.session))
                self._sessions.pop(peer.session, None)
                del self._peers[peer.node]
        for node, link in self._links.items():
            if node not in self._peers:
                self._peers[node] = Peer(node, link.incarnation, since=now)

    def _look_at(self, peer: Peer, now: float) -> None:
        since_s = now - peer.since
        match peer.state:
            case "apart" if now >= peer.retry_at and self._means is not None:
                s = self._settings
                self._become(peer, "offered", now)
                self._send(
                    peer.node,
                    m.FabricOffered(
                        self._hub.life, s.provider, s.interface, s.library, s.port_range, s.heartbeat_interval_s
                    ),
                )
            case "offered" if since_s > ANSWER_TIMEOUT_S:
                peer.problem = f"no answer within {ANSWER_TIMEOUT_S:g} s"
                self._become(peer, "apart", now)
            case "asked" | "meeting" if since_s > ATTEMPT_TIMEOUT_S:
                self._part(peer, f"no heartbeat within {ATTEMPT_TIMEOUT_S:g} s", now)
            case "up" if peer.is_watched and self._is_idle(peer, now):
                self._note("fabric beater is silent", node=peer.node, sent=peer.sent, received=peer.received)
                self._down(peer, "its MPI beater sends nothing", now)
            case "up" if peer.sent > peer.received and now - peer.heard_at > SILENT_S:
                self._part(peer, f"what it sends has not come for {SILENT_S:g} s", now)

    def _is_idle(self, peer: Peer, now: float) -> bool:
        """All that its agent says was sent has come, and more should have been sent since."""
        patience_s = 2 * self._settings.heartbeat_interval_s
        return now - peer.heard_at > patience_s and peer.said_at > peer.heard_at + patience_s / 2 and (
            peer.sent <= peer.received
        )  # fmt: skip

    def _give_port(self, peer: Peer, now: float) -> None:
        assert self._means is not None
        peer.session, peer.port = secrets.randbits(63), self._ports[self._num_ports % len(self._ports)]
        peer.received = peer.sent = 0
        self._num_ports += 1
        self._sessions[peer.session] = peer
        self._become(peer, "asked", now)
        self._send(peer.node, m.FabricPort(peer.session, peer.port, self._means.address, self._means.knock))

    # ---- for people -----------------------------------------------------------------------------------------------

    def _announce(self, now: float) -> None:
        """Once: what is watched, and what is not; and once more when nothing is missing."""
        if self._is_complete or not self._peers or self._means is None:
            return
        self._first_at = self._first_at or now
        missing = {n: peer.problem or "not yet" for n, peer in self._peers.items() if peer.state != "up"}
        is_early = any(peer.state in _NOT_UP for peer in self._peers.values()) and now - self._first_at < SETTLED_S
        if missing and (is_early or self._is_announced):
            return
        self._is_announced, self._is_complete = True, not missing
        count = len(self._peers) - len(missing)
        by_reason = Counter(missing.values())
        said = "; ".join(
            f"not on {', '.join(n for n, why in missing.items() if why == reason)}: {reason}" for reason in by_reason
        )
        self._note("fabric is watched", means=str(self._means), nodes=count, missing=missing)
        if count:
            say(f"fabric: {self._means}, {count} node{'s' * (count > 1)}" + (f"; {said}" if said else ""))
        else:
            say(f"the fabric is not watched: {said}")
        hopeless = any(peer.state == "useless" or peer.failures >= MANY_FAILURES for peer in self._peers.values())
        if hopeless and self._settings.mpi == "required":
            self._refuse(f"fabric.mpi is required, and the fabric is not watched {said.removeprefix('not ')}")


def _ipv4(host: str) -> str:
    """The address of a host, or what was given (then no interface has it, and that will be said)."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host
