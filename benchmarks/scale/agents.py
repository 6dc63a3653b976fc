"""Simulated agents, thousands in one process: real connections, handshake, frames, messages; no workers behind them.

`python -m benchmarks.scale.agents`: orders come as JSON lines on stdin, answers go out on stdout (`Fleet.obey`). One
thread, one epoll, raw sockets. An agent answers at once, in the name of its workers: what workers would need time for
(leaving a collective, loading torch, connecting groups, copying state) takes none here. Probes of other nodes are
answered from what this process knows of them, a failed one after its time-out.
"""

from __future__ import annotations

import collections
import json
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.scale.agent import Agent, World
from flashrec.wire.frames import ProtocolError

MAX_CONNECTING = 256  # a real cluster's agents do not come in the same millisecond either
MAX_AT_ONCE = 64  # then heartbeats that are due: real agents do not wait for each other
_READ_BYTES = 256 * 1024


class Fleet:
    """The event loop and what is shared by all agents."""

    def __init__(self, job: dict[str, Any]) -> None:
        """job: its shape, its secret, and where the manager listens."""
        self.world = World(
            job["ranks_per_node"], job["num_ranks"], job["rendezvous"], bytes.fromhex(job["secret"]), Path(job["logs"])
        )
        self._epoll = select.epoll()
        self._agents: dict[int, Agent] = {}  # by descriptor
        self._nodes: dict[str, Agent] = {}
        self._waiting: collections.deque[tuple[str, int]] = collections.deque()
        self._connecting = 0
        self._beats: collections.deque[tuple[float, Agent]] = collections.deque()  # all have the same interval
        self._orders = b""
        self._over = False
        self._address = ("127.0.0.1", job["port"])
        self._epoll.register(sys.stdin.fileno(), select.EPOLLIN)

    def run(self) -> None:
        while not self._over:
            now = time.monotonic()
            due = min((self._beats[0][0] if self._beats else now + 1.0), self._next_timer(now + 1.0))
            for fd, events in self._epoll.poll(max(0.0, due - now), MAX_AT_ONCE):
                if fd == sys.stdin.fileno():
                    self._read_orders()
                elif fd in self._agents:
                    self._serve(self._agents[fd], events)
            self._beat(time.monotonic())
            self._fire(time.monotonic())
            self._connect()

    # ---- orders ---------------------------------------------------------------------------------------------------

    def _read_orders(self) -> None:
        data = sys.stdin.buffer.raw.read(1 << 20)  # type: ignore[attr-defined]
        if not data:
            self._over = True
            return
        *lines, self._orders = (self._orders + data).split(b"\n")
        for line in lines:
            self.obey(json.loads(line))

    def obey(self, order: dict[str, Any]) -> None:
        """start: agents of these nodes. lose: these nodes, how: 'reset' or 'silence'. tell: answer
        with what was counted since the last time."""
        match order["do"]:
            case "start":
                self._waiting.extend((node, order["launch"]) for node in order["nodes"])
            case "lose":
                lost_at = time.monotonic()
                for node in order["nodes"]:
                    self._lose(self._nodes.pop(node), order["how"])
                self._answer({"lost_at": lost_at})
            case "tell":
                self._answer(self.world.counted(self._nodes.values()))

    def _answer(self, said: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    def _lose(self, agent: Agent, how: str) -> None:
        agent.lost = True
        self.world.lost.add(agent.node)
        if how == "silence":  # the connection stays: whatever the manager sends piles up in the kernel
            self._epoll.modify(agent.sock, select.EPOLLRDHUP)
            return
        self._close(agent)

    # ---- connections ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        while self._waiting and self._connecting < MAX_CONNECTING:
            node, launch = self._waiting.popleft()
            sock = socket.socket()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            agent = Agent(self.world, node, launch, sock)
            self._agents[sock.fileno()] = agent
            self._connecting += 1
            sock.connect_ex(self._address)
            self._epoll.register(sock, select.EPOLLOUT)

    def _serve(self, agent: Agent, events: int) -> None:
        if agent.lost or events & (select.EPOLLHUP | select.EPOLLERR):
            self._close(agent)
            return
        try:
            if events & select.EPOLLOUT and not agent.is_greeted:
                agent.greet()
            if events & select.EPOLLIN and not self._read(agent):
                return
            agent.flush()
        except (OSError, ProtocolError):
            self._close(agent)
            return
        if agent.is_live and agent.node not in self._nodes:
            self._connecting -= 1
            self._nodes[agent.node] = agent
            self.world.lost.discard(agent.node)
            offset = agent.interval_s * (len(self._nodes) % 97) / 97  # spread over the interval
            self._beats.append((time.monotonic() + offset, agent))
            self._beats = collections.deque(sorted(self._beats, key=lambda beat: beat[0]))
        wanted = select.EPOLLIN | (select.EPOLLOUT if agent.unsent else 0)
        if wanted != agent.wanted:
            agent.wanted = wanted
            self._epoll.modify(agent.sock, wanted)

    def _read(self, agent: Agent) -> bool:
        data = agent.sock.recv(_READ_BYTES)
        if not data:
            self._close(agent)
            return False
        agent.receive(data)
        return True

    def _close(self, agent: Agent) -> None:
        if agent.sock.fileno() < 0:
            return
        del self._agents[agent.sock.fileno()]
        self._epoll.unregister(agent.sock)
        if agent.lost:
            agent.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset, no farewell
        agent.sock.close()
        agent.lost = True
        if self._nodes.get(agent.node) is agent:
            del self._nodes[agent.node]

    # ---- time -----------------------------------------------------------------------------------------------------

    def _beat(self, now: float) -> None:
        while self._beats and self._beats[0][0] <= now:
            due, agent = self._beats.popleft()
            if agent.lost:
                continue
            try:
                agent.beat(now)
                agent.flush()
            except OSError:
                self._close(agent)
                continue
            self._beats.append((max(due + agent.interval_s, now), agent))

    def _next_timer(self, otherwise: float) -> float:
        return self.world.timers[0][0] if self.world.timers else otherwise

    def _fire(self, now: float) -> None:
        while self.world.timers and self.world.timers[0][0] <= now:
            _, agent, message = self.world.timers.popleft()
            if not agent.lost:
                agent.say(message)
                agent.flush()


if __name__ == "__main__":
    Fleet(json.loads(sys.stdin.buffer.raw.readline())).run()  # type: ignore[attr-defined]
