"""A real manager with real agents, one of which it cannot hear: the others are asked, over real UDP, and what they find
decides. Workers are without torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from flashrec.core.lives import Verdict
from flashrec.core.types import Phase
from flashrec.manager.app import Manager
from tests.manager.test_whole_manager import Job, job, play

# Patience for a busy machine: what is tested is who decides, not how soon.
SETTINGS = (
    "detection.dead_after_s=3", "detection.hasten_after_s=3", "detection.probe_timeout_s=0.9",
    "detection.probed_patience_s=30", "control.lease_s=60",
)  # fmt: skip


class Relay:
    """All control connections go through here; that of `held` can be held up, as by a network that drops packets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.open, self.num_held = "", asyncio.Event(), 0
        self.open.set()
        launcher = Manager._launcher
        monkeypatch.setattr(Manager, "_launcher", lambda manager, port: launcher(manager, self.listen(manager, port)))
        self.tasks: set[asyncio.Task[None]] = set()

    def listen(self, manager: Manager, port: int) -> int:
        self.target = port
        listener = socket.create_server(("127.0.0.1", 0))
        self.server = asyncio.create_task(asyncio.start_server(self.serve, sock=listener))
        return int(listener.getsockname()[1])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self.target)
        whose: list[str] = []
        ways = ((reader, there[1]), (there[0], writer))
        await asyncio.gather(*(self.copy(*way, whose) for way in ways), return_exceptions=True)
        for end in (writer, there[1]):
            end.transport.abort()

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, whose: list[str]) -> None:
        while data := await reader.read(65536):
            whose += [node for node in ("local0", "local1", "local2") if node.encode() in data]
            if self.held and self.held in whose[:1]:
                self.num_held += 1
                await self.open.wait()
            writer.write(data)
        writer.transport.abort()

    def hold(self, node: str) -> None:
        self.held = node
        self.open.clear()

    def release(self) -> None:
        self.held = ""
        self.open.set()


def agent_pid(it: Job, node: str) -> int:
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            environ = (entry / "environ").read_bytes().split(b"\0") if it.manager._key.encode() in words else []
            if b"--manager" in words and f"FLASHREC_NODE={node}".encode() in environ:
                return int(entry.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    raise AssertionError(f"no agent of {node}")


def notes(it: Job, what: str, **fields: Any) -> list[dict[str, Any]]:
    return [x for x in it.lines() if x.get("what") == what and fields.items() <= x.items()]


def events(it: Job, kind: str) -> list[dict[str, Any]]:
    return [x["event"] for x in it.lines() if x.get("event", {}).get("type") == kind]


def dead(it: Job) -> list[dict[str, Any]]:
    return [x for x in it.lines() if x["kind"] == "verdict" and x["state"] == "dead"]


def test_a_node_that_others_reach_gets_time_and_one_that_nobody_reaches_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        relay = Relay(monkeypatch)
        async with job(tmp_path, *SETTINGS) as it:
            await it.running()
            await it.until(lambda: all(it.manager.control.probe_place(f"local{i}", "control") for i in range(3)))

            relay.hold("local0")
            held_at = asyncio.get_running_loop().time()
            await it.until(lambda: notes(it, "detection", node="local0"))
            (note,) = notes(it, "detection", node="local0")
            assert "can reach it: the path between manager and node is lost" in note["text"]
            assert notes(it, "probe answered", node="local0", reached=True)
            await it.until(lambda: asyncio.get_running_loop().time() > held_at + 4.0)
            assert relay.num_held
            assert it.manager.detector.state_of("local0") == "suspect", "3 s of silence would have been enough"
            relay.release()
            await it.until(lambda: it.manager.detector.state_of("local0") == "alive")
            assert it.machine.phase is Phase.RUNNING and it.machine.generation == 1 and not dead(it)

            pid = agent_pid(it, "local2")
            os.kill(pid, signal.SIGSTOP)
            try:
                await it.until(lambda: dead(it))
            finally:
                os.kill(pid, signal.SIGCONT)
            (verdict,) = dead(it)
            assert verdict["subject"] == "node local2"
            assert "local0, local1 cannot reach it" in verdict["reason"]
            assert notes(it, "probe answered", by="local0", node="local1", reached=True), "they could look"
            assert await it.finish() == 0

    play(scene)


def test_a_lost_link_is_no_end_of_the_agent_and_its_workers_are_killed_through_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path, *SETTINGS) as it:
            await it.running()
            await it.until(lambda: it.manager.detector.state_of("local2") == "alive")
            it.manager.verdicts.judge([Verdict("local0", 1, "dead", "fabric link lost: tested", "link")])
            await it.until(lambda: it.machine.generation == 2 and it.machine.phase is Phase.RUNNING)
            assert it.machine.members.slots[0].node == "local2"
            assert it.manager.detector.state_of("local0") == "alive"
            assert "local0" in it.manager.control.links
            kills = [x["effect"] for x in it.lines() if x.get("effect", {}).get("type") == "KillWorkers"]
            assert kills[0]["node"] == "local0"
            it.manager.verdicts.judge([Verdict("local0", 1, "alive", "heard again", "link")])
            await it.until(lambda: events(it, "NodeMended"))  # the journal is written in a thread
            (mended,) = events(it, "NodeMended")
            assert (mended["node"], mended["incarnation"], mended["cause"]) == ("local0", 1, "link")
            link = "fabric link of node local0"
            assert [x["state"] for x in it.lines() if x.get("subject") == link] == ["dead", "alive"]
            it.manager.verdicts.judge(it.manager.detector.condemn("local2", "tested"))
            await it.running(3)
            assert it.machine.members.slots[0].node == "local0", "it can be used again"
            assert await it.finish() == 0

    play(scene)
