"""A whole manager with real agents and workers without torch, in this process: its guards, its ends, its journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashrec.config.load import load_config
from flashrec.core import effects as fx
from flashrec.core import events as e
from flashrec.core.effects import AnyEffect, ChangePhase
from flashrec.core.events import AnyEvent
from flashrec.core.machine import Machine
from flashrec.core.types import Phase
from flashrec.manager import app
from flashrec.manager.app import Manager
from flashrec.manager.request import Request, RequestError, Shape

WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
SETTINGS = ["recovery.agent_retry_s=0.2", "detection.tick_interval_s=0.05", "control.reconnect_s=5"]
LIMIT_S = 40
NODES = ("local0", "local1", "local2")


class Job:
    """One manager in a task; `folder` is what its workers look into."""

    def __init__(
        self, folder: Path, settings: list[str], command: tuple[str, ...] | None, nodes: tuple[str, ...] = NODES
    ) -> None:
        self.folder = folder
        request = Request(
            command or (*WORKER, str(folder)), (), None, None, 1, load_config(None, SETTINGS + settings), 3
        )
        job_dir = folder / "job"
        job_dir.mkdir()
        self.manager = Manager(request, Shape(2, 1, len(nodes) - 2), nodes, job_dir, "127.0.0.1", None)
        self.task = asyncio.create_task(self.manager.run())

    @property
    def machine(self) -> Machine:
        return self.manager.machine

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert not self.task.done(), self.machine.stop_reason
            await asyncio.sleep(0.01)

    async def running(self, generation: int = 1) -> None:
        await self.until(lambda: self.machine.phase is Phase.RUNNING and self.machine.generation >= generation)

    def order(self, rank: int, what: str) -> None:
        (self.folder / "new").write_text(what)
        (self.folder / "new").rename(self.folder / str(rank))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "job/journal.jsonl").read_text().splitlines()]

    def finish(self) -> asyncio.Task[int]:
        (self.folder / "finish").touch()
        return self.task


@contextlib.asynccontextmanager
async def job(
    folder: Path, *settings: str, command: tuple[str, ...] | None = None, nodes: tuple[str, ...] = NODES
) -> AsyncIterator[Job]:
    started = Job(folder, list(settings), command, nodes)
    try:
        yield started
    finally:
        started.manager._interrupted(signal.SIGTERM)
        await asyncio.gather(started.task, return_exceptions=True)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))


def replayed(lines: list[dict[str, Any]], limits) -> tuple[Machine, list[AnyEffect]]:
    """Feed the events of a journal to a fresh machine."""
    machine, effects = Machine(limits), []
    for line in lines:
        if line["kind"] == "event":
            event = msgspec.convert(line["event"], AnyEvent, str_keys=True)
            effects += machine.handle(event, line["mono"])
            assert machine.generation == line["generation"]
            assert machine.phase == line["phase"]
    return machine, effects


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job_with_its_code(number: signal.Signals, tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            os.kill(os.getpid(), number)
            assert await it.task == 128 + number

    former = signal.signal(number, signal.SIG_DFL)  # a background job of a shell ignores some of them, and so would we
    try:
        play(scene)
    finally:
        signal.signal(number, former)


def test_nohup_is_respected(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            os.kill(os.getpid(), signal.SIGHUP)
            await it.finish()
            assert it.machine.exit_code == 0

    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        play(scene)
    finally:
        signal.signal(signal.SIGHUP, former)


def test_ranks_are_marked_for_the_plugin_without_any_environment(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            assert it.manager._welcome(1).env["FLASHREC_HANDED_OVER"] == "1"

    play(scene)


def test_a_job_with_recoveries_replays_from_its_journal(tmp_path: Path) -> None:
    """A worker dies, a node's agent dies, the job finishes: the journal gives the same state and the same effects."""

    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            it.order(1, "die")
            await it.running(2)
            node = it.machine.members.slots[0].node
            link = it.manager.control.links[node]
            link.channel.abort("pulled by the test")
            await it.running(3)
            assert it.machine.members.slots[0].node == "local2", "the spare took over"
            await it.until(lambda: it.manager.detector.state_of(node) == "alive")
            assert await it.finish() == 0
            lines = it.lines()
            machine, effects = replayed(lines, it.manager.request.config.recovery)
            assert machine.phase is Phase.STOPPED
            assert (machine.generation, machine.stop_reason) == (it.machine.generation, "all ranks have finished")
            phases = [(str(x.before), str(x.after), x.generation) for x in effects if isinstance(x, ChangePhase)]
            assert phases == [(x["from"], x["to"], x["generation"]) for x in lines if x["kind"] == "phase"]
            others = [msgspec.to_builtins(x) for x in effects if not isinstance(x, ChangePhase)]
            assert json.loads(json.dumps(others)) == [
                json.loads(msgspec.json.encode(msgspec.convert(x["effect"], fx.AnyEffect, str_keys=True)))
                for x in lines if x["kind"] == "effect"
            ]  # fmt: skip
            assert not (tmp_path / "job/secret").exists()

    play(scene)


def test_the_output_of_every_life_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            it.order(0, "die")
            await it.running(2)
            await it.finish()

    play(scene)
    said = capfd.readouterr().out
    assert "[rank 0] hello of rank 0, life 1" in said
    assert "[rank 0.2] hello of rank 0, life 2" in said


def test_an_exception_that_comes_again_ends_the_job_with_code_1(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            it.order(1, "raise")
            await it.running(2)
            it.order(1, "raise")
            assert await it.task == 1
            assert "same exception again" in it.machine.stop_reason

    play(scene)


@pytest.mark.parametrize("where", ["timer", "connection", "task"])
def test_an_internal_error_ends_the_job_in_words(where: str, tmp_path: Path, monkeypatch) -> None:
    """Whatever raises, wherever: the job does not hang on with a part of its manager dead."""

    def broken(*_: object) -> None:
        raise AssertionError("no transition")

    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            if where == "timer":
                asyncio.get_running_loop().call_soon(broken)
            elif where == "connection":
                monkeypatch.setattr(it.manager.control, "_hear", broken)
            else:
                monkeypatch.setattr(it.manager.detector, "tick", broken)
            assert await it.task == 70
            notes = [x for x in it.lines() if x["kind"] == "note" and x["what"] == "internal error"]
            assert "AssertionError: no transition" in notes[0]["traceback"]
            assert not (tmp_path / "job/secret").exists()

    play(scene)


def test_the_end_of_a_life_is_known_before_the_next_one_begins(tmp_path: Path) -> None:
    """Connections that end are gathered for a moment: a new life of the same agent in that moment must not hide it."""

    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            manager, node = it.manager, it.machine.members.slots[0].node
            manager.verdicts.judge(manager.detector.disconnected(node, 1, "pulled by the test"))
            assert it.machine.generation == 1
            manager.emit(e.AgentJoined(node, 2))
            assert it.machine.generation == 2 and it.machine.members.nodes[node].incarnation == 2

    play(scene)


def test_a_job_that_cannot_be_reached_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = taken.sockets[0].getsockname()[1]
        for setting in (f"control.port={port}", "control.host=192.0.2.1"):
            folder = tmp_path / setting
            folder.mkdir()
            started = Job(folder, [setting], None)
            with pytest.raises(RequestError, match=r"cannot listen on .*control\.host"):
                await started.task
            assert not (folder / "job/secret").exists()
            assert not (folder / "job/journal.jsonl").exists(), "the same --job-dir can be used again"
        taken.close()

    play(scene)


@pytest.mark.parametrize(("listen", "told"), [("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1")])
def test_agents_are_told_where_the_manager_listens(listen: str, told: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path, f"control.host={listen}") as it:
            await it.running()
            assert it.manager._launcher(7)._contact.manager == f"{told}:7"
            assert await it.finish() == 0

    play(scene)


def test_a_full_disk_does_not_end_the_job(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            monkeypatch.setattr(Path, "write_bytes", full)  # status.json
            it.order(1, "die")
            await it.running(2)
            assert await it.finish() == 0

    monkeypatch.setattr(app, "STATUS_INTERVAL_S", 0.01)
    play(scene)


def test_a_script_without_init_ends_with_its_own_code(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path, command=("sh", "-c", "exit 7")) as it:
            assert await it.task == 7

    play(scene)


def test_an_interrupted_job_ends_all_its_processes(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            pids = [x["event"]["pid"] for x in it.lines() if x.get("event", {}).get("type") == "WorkerStarted"]
            it.manager._interrupted(signal.SIGTERM)
            assert await it.task == 143
            assert pids and not [pid for pid in pids if _is_running(pid)]

    play(scene)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_no_descriptors_are_left(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            await it.finish()

    play(scene)
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

        async def again(folder: Path = tmp_path / name) -> None:
            async with job(folder) as it:
                await it.running()
                await it.finish()

        play(again)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_node_that_slurm_has_taken_is_no_spare_until_slurm_gives_it_back(tmp_path: Path) -> None:
    async def scene() -> None:
        async with job(tmp_path) as it:
            await it.running()
            await it.until(lambda: it.manager.detector.state_of("local2") == "alive")
            it.manager.slurm_said("local2", frozenset({"DOWN", "NOT_RESPONDING"}))
            assert it.manager.detector.state_of("local2") == "dead"
            await it.until(lambda: any("Slurm says DOWN" in x.get("why", "") for x in it.lines()))
            assert it.manager.detector.state_of("local2") == "dead"
            it.manager.slurm_said("local2", frozenset({"ALLOCATED"}))
            await it.until(lambda: it.manager.detector.state_of("local2") == "alive")
            assert await it.finish() == 0

    play(scene)
