"""Flat or a tree? The same number of beaters straight to a root, or through relays that send one message per period
with what they heard. Compared: CPU of the root, and of a relay. `python -m benchmarks.mpi_heartbeats.tree`.

As a child (`… tree root|relay`) it is the hub of flashrec.transport.mpi with what a tree needs; it is not in the
product (docs/decisions/0017).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.mpi_heartbeats.__main__ import _cpu_s, _pss_mib
from flashrec.transport.mpi import hub, words
from flashrec.transport.mpi.library import load
from flashrec.transport.mpi.parent import Parent
from flashrec.transport.mpi.supervisor import Supervisor
from flashrec.transport.mpi.words import BEAT_TAG, TICK_INTERVAL_S, Accept, Beats, Loaded, Meet, Settings

ENTRY = struct.Struct("!QQ")  # session, newest sequence
MAX_BYTES = 64 * 1024
LIMIT_S = 400.0


class Node(hub.Hub):
    """A root takes batches from relays; a relay takes heartbeats and sends batches up, once in `interval_s`."""

    def __init__(self, parent: Parent, mpi: Any, interval_s: float, is_root: bool) -> None:
        super().__init__(parent, mpi, None)
        self._interval_s, self._is_root = interval_s, is_root
        self._big = bytearray(MAX_BYTES)
        self._up: Any = None
        self._newest: dict[int, int] = {}
        self._sending: list[Any] = []

    def run(self) -> None:
        looked_at = sent_at = time.monotonic()
        while True:
            for word in self._parent.hear(max(0.0, looked_at + TICK_INTERVAL_S - time.monotonic())):
                if isinstance(word, Accept):
                    self._accept(word)
                elif isinstance(word, Meet):
                    self._parent.say(words.Going(word.session))
                    self._up = self._mpi.COMM_SELF.Connect(word.port, self._patience)
            now = time.monotonic()
            if now - looked_at >= TICK_INTERVAL_S:
                looked_at = now
                found = self._unpack() if self._is_root else self._look()
                if self._up is None:
                    self._parent.say(found)
                    continue
                self._newest.update(found.newest)
                self._parent.say(Beats())
                if now - sent_at >= self._interval_s:
                    sent_at = now
                    self._send_up()

    def _send_up(self) -> None:
        data = b"".join(ENTRY.pack(*item) for item in self._newest.items())
        self._newest.clear()
        self._sending = [item for item in self._sending if not item[0].Test()]
        self._sending.append((self._up.Isend([data, self._mpi.BYTE], 0, BEAT_TAG), data))

    def _unpack(self) -> Beats:
        newest = {}
        status = self._mpi.Status()
        for session in self._sessions.values():
            while session.comm.Iprobe(source=0, tag=BEAT_TAG, status=status):
                count = status.Get_count(self._mpi.BYTE)
                session.comm.Recv([self._big, count, self._mpi.BYTE], source=0, tag=BEAT_TAG)
                newest.update(ENTRY.iter_unpack(self._big[:count]))
        return Beats(tuple(newest.items()))


def child(role: str) -> None:
    parent = Parent()
    settings = parent.begin().settings
    mpi, means = load(settings)
    parent.say(Loaded(means, tuple(mpi.Open_port() for _ in range(hub.NUM_PORTS))))
    Node(parent, mpi, settings.interval_s, role == "root").run()


class Local(Supervisor):
    module = "benchmarks.mpi_heartbeats.tree"


class Member:
    """One supervised process of the tree."""

    def __init__(self, kind: type[Supervisor], role: str) -> None:
        self.said: list[Any] = []
        self.supervisor = kind(role, Settings(interface="lo"), self.hear, print)
        self.heard: set[int] = set()
        self.loaded: Loaded | None = None
        self.task = asyncio.create_task(self.supervisor.run())

    def hear(self, word: Any) -> None:
        if isinstance(word, Loaded):
            self.loaded = word
        elif isinstance(word, Beats):
            self.heard.update(session for session, _ in word.newest)
        else:
            self.said.append(word)


_numbers = itertools.count(1)


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def meet(lower: Member, upper: Member) -> int:
    await _until(lambda: lower.loaded and upper.loaded)
    assert upper.loaded is not None
    session = next(_numbers)
    port = upper.loaded.ports[session % len(upper.loaded.ports)]
    lower.supervisor.say(Meet(session, 1, port, ("", 0)))
    await _until(lambda: words.Going(session) in lower.said)
    upper.supervisor.say(Accept(session, 1, port))
    await _until(lambda: any(isinstance(word, words.Accepted) and word.session == session for word in upper.said))
    return session


async def measure(count: int, fan_in: int, runs: int, seconds: float) -> dict[str, Any]:
    """fan_in 0: flat, with the product's own hub."""
    members: list[Member] = []

    def start(kind: type[Supervisor], role: str) -> Member:
        members.append(Member(kind, role))
        return members[-1]

    try:
        async with asyncio.timeout(LIMIT_S):
            root = start(Local, "root") if fan_in else start(Supervisor, "hub")
            relays = [start(Local, "relay") for _ in range(-(-count // fan_in))] if fan_in else []
            for relay in relays:
                await meet(relay, root)
            sessions = [
                await meet(start(Supervisor, "beater"), relays[number // fan_in] if fan_in else root)
                for number in range(count)
            ]
            await _until(lambda: set(sessions) <= root.heard)
            looks = []
            for _ in range(runs):
                pids = [root.supervisor.pid, *(relay.supervisor.pid for relay in relays)]
                before, at = [_cpu_s(pid) for pid in pids], time.monotonic()
                await asyncio.sleep(seconds)
                lasted_s = time.monotonic() - at
                looks.append([100 * (_cpu_s(pid) - cpu) / lasted_s for pid, cpu in zip(pids, before, strict=True)])
            row = {"beaters": count, "fan_in": fan_in or None, "relays": len(relays)}
            row["root_cpu_percent"] = round(statistics.median(look[0] for look in looks), 3)
            row["root_pss_mib"] = round(_pss_mib(root.supervisor.pid), 1)
            if relays:
                row["relay_cpu_percent"] = round(statistics.median(statistics.mean(look[1:]) for look in looks), 3)
            return row
    finally:
        for member in members:
            member.task.cancel()
        await asyncio.gather(*(member.task for member in members), return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beaters", type=int, default=100)
    parser.add_argument("--fan-in", type=int, nargs="+", default=[0, 10], help="0: flat")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    for fan_in in args.fan_in:
        print(json.dumps(asyncio.run(measure(args.beaters, fan_in, args.runs, args.seconds))), flush=True)


if __name__ == "__main__":
    child(sys.argv[1]) if sys.argv[1:] in (["root"], ["relay"]) else main()
