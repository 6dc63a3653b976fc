"""A whole manager whose pool is made of more local nodes: they come, get ranks, are lost, and go back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from flashrec.config.load import load_config
from flashrec.core import events as e
from flashrec.core.effects import AnyEffect, ReleaseNode, RequestNode
from flashrec.core.events import AnyEvent
from flashrec.core.limits import PoolLimits
from flashrec.core.machine import Machine
from flashrec.manager.app import Manager
from flashrec.manager.request import Request, Shape
from tests.manager.test_whole_manager import SETTINGS, WORKER, Job, play

LIMITS = PoolLimits(5, 30.0)


class Pool:
    """In place of Companions: gives the nodes it was made with, one after another, then says no."""

    def __init__(self, manager: Manager, nodes: list[str]) -> None:
        self.manager, self.nodes = manager, nodes
        self.given: dict[str, int] = {}
        self.released: list[str] = []
        self.failures: list[str] = []
        self.stops = 0

    def request(self, effect: RequestNode) -> None:
        loop = asyncio.get_running_loop()
        if not self.nodes:
            loop.call_soon(self.manager.emit, e.NodeRefused(effect.request, "pool p: none left", False))
            return
        node = self.nodes.pop(0)
        self.given[node] = 100 + effect.request
        loop.call_soon(self.manager.node_came, effect.request, node)

    def release(self, effect: ReleaseNode) -> None:
        self.given.pop(effect.node, None)
        self.released.append(effect.node)

    def job_of(self, node: str) -> int | None:
        return self.given.get(node)

    def agent_failed(self, node: str, said: str) -> None:
        self.failures.append(node)

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stops += 1


class PoolJob(Job):
    """Two active nodes, no spare."""

    def __init__(self, folder: Path, *pool: str) -> None:
        self.folder = folder
        settings = [*SETTINGS, "recovery.agent_retry_s=60", "recovery.spare_wait_s=0.1"]
        request = Request((*WORKER, str(folder)), (), None, None, 1, load_config(None, settings), 2)
        (folder / "job").mkdir()
        self.manager = Manager(request, Shape(2, 1, 0), ("local0", "local1"), folder / "job", "127.0.0.1", None)
        self.machine.pool.limits = LIMITS
        self.pool = self.manager._companions = Pool(self.manager, list(pool))  # type: ignore[assignment]
        self.task = asyncio.create_task(self.manager.run())

    def lose(self, node: str) -> None:
        """For good: it is not admitted again."""
        self.manager.control.bar(node, "lost by the test")
        self.manager.control.links[node].channel.abort("pulled by the test")

    def nodes_of_ranks(self) -> list[str]:
        return [slot.node for slot in self.machine.members.slots]


@contextlib.asynccontextmanager
async def job(folder: Path, *pool: str) -> AsyncIterator[PoolJob]:
    started = PoolJob(folder, *pool)
    try:
        yield started
    finally:
        started.manager._interrupted(signal.SIGTERM)
        await asyncio.gather(started.task, return_exceptions=True)


def test_nodes_come_from_the_pool_and_go_back(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path, "local2", "local3") as it:
            await it.running()
            it.lose("local0")
            await it.running(2)
            assert it.nodes_of_ranks() == ["local2", "local1"]
            assert it.pool.released == []
            assert it.manager.nodes == ("local0", "local1", "local2")
            it.lose("local2")
            await it.running(3)
            assert it.nodes_of_ranks() == ["local3", "local1"]
            assert it.pool.released == ["local2"]
            assert it.manager.nodes == ("local0", "local1", "local3")
            assert it.manager.detector.state_of("local2") == "dead", "it was lost before it was given back"
            assert {row["node"]: row["companion_job"] for row in it.manager._snapshot()["nodes"]} == {
                "local0": None, "local1": None, "local3": 102,
            }  # fmt: skip
            assert await it.finish() == 0
            assert it.pool.stops > 0
            replay(it)

    play(scene)


def replay(it: PoolJob) -> None:
    """The journal gives the same requests and the same end."""
    machine, effects = Machine(it.manager.request.config.recovery, LIMITS), []
    for line in it.lines():
        if line["kind"] == "event":
            effects += machine.handle(msgspec.convert(line["event"], AnyEvent, str_keys=True), line["mono"])
    journaled = [msgspec.convert(x["effect"], AnyEffect, str_keys=True) for x in it.lines() if x["kind"] == "effect"]
    pool = [effect for effect in effects if isinstance(effect, RequestNode | ReleaseNode)]
    assert pool == [effect for effect in journaled if isinstance(effect, RequestNode | ReleaseNode)]
    assert machine.stop_reason == it.machine.stop_reason
    assert machine.pool == it.machine.pool


def test_an_empty_pool_is_in_the_last_line(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            it.lose("local0")
            assert await it.task == 75
            assert it.machine.stop_reason.endswith("; pool p: none left")

    play(scene)


@pytest.mark.parametrize("how", ["in words", "an internal error", "the end itself fails"])
def test_companion_jobs_end_on_every_way_out(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise OSError("no such thing")

    async def scene() -> None:
        async with job(tmp_path, "local2") as it:
            await it.running()
            if how == "an internal error":
                asyncio.get_running_loop().call_soon(lambda: 1 / 0)
                assert await it.task == 70
            elif how == "in words":
                it.manager._interrupted(signal.SIGTERM)
                assert await it.task == 143
            else:
                monkeypatch.setattr(it.manager, "_wind_down", broken)
                it.manager._interrupted(signal.SIGTERM)
                with pytest.raises(OSError, match="no such thing"):
                    await it.task
            assert it.pool.stops > 0

    play(scene)
