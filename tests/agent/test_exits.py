"""The exit socket: only datagrams of the contract, only from root or our own user, and nothing waits for them long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.agent import exits as module
from flashrec.agent.exits import ExitSocket, TaskExit, describe_status, parse_task_exit
from flashrec.core import events as e
from flashrec.transport.paths import exit_socket_path
from flashrec.wire import messages as m
from tests.agent.support import node, play, task, until

GOOD = b"FLASHREC1 task_exit 7 3 5 4711 9\n"


def test_a_datagram_of_the_contract() -> None:
    assert parse_task_exit(GOOD) == TaskExit(7, 3, 5, 4711, 9)
    assert parse_task_exit(b"FLASHREC1 task_exit 4294967295 4294967291 0 4194304 65535\n") is not None


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", GOOD[:-1], GOOD + b"\n", b" " + GOOD, GOOD.replace(b"FLASHREC1", b"FLASHREC2"),
     GOOD.replace(b" 9", b""), GOOD.replace(b" 9", b" -9"), GOOD.replace(b" 9", b" 9 9"),
     GOOD.replace(b" 9", b" 65536"), GOOD.replace(b"4711", b"0"), GOOD.replace(b"4711", b"1"),
     GOOD.replace(b"4711", b"4 711"),
     GOOD.replace(b"4711", b"x"), GOOD.replace(b" ", b"\t"), GOOD.replace(b"7", b"\xd9\xa1"),
     b"\xff" * 128, GOOD.replace(b"7", b"7" * 11)],
)  # fmt: skip
def test_anything_else_is_none(data: bytes) -> None:
    assert parse_task_exit(data) is None


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exit code 0"), (3 << 8, "exit code 3"), (9, "killed by signal 9 (SIGKILL)"),
     (11 | 0x80, "killed by signal 11 (SIGSEGV), core dumped"), (40, "killed by signal 40")],
)  # fmt: skip
def test_words(status: int, words: str) -> None:
    assert describe_status(status) == words


def send(path: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(data, str(path))


@contextlib.contextmanager
def listening(path: Path) -> Iterator[list[TaskExit]]:
    heard: list[TaskExit] = []
    listener = ExitSocket(path, heard.append)
    try:
        yield heard
    finally:
        listener.close()


def test_what_is_not_ours_is_left_out_and_the_next_is_heard(tmp_path: Path) -> None:
    async def scene() -> None:
        with listening(tmp_path / "s") as heard:
            for data in (b"nonsense", b"", GOOD + b"x" * 500, b"y" * 128):
                send(tmp_path / "s", data)
            send(tmp_path / "s", GOOD)
            await until(lambda: heard)
            assert heard == [TaskExit(7, 3, 5, 4711, 9)]

    play(scene)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_not_heard(tmp_path: Path) -> None:
    """Even if the path's permissions let him send."""

    async def scene() -> None:
        path = Path(f"/tmp/fr-exit-test-{os.getpid()}")
        try:
            with listening(path) as heard:
                path.chmod(0o777)
                child = os.fork()
                if child == 0:
                    os.setuid(65534)
                    send(path, GOOD)
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
                send(path, GOOD.replace(b"4711", b"4712"))
                await until(lambda: heard)
                assert [ended.pid for ended in heard] == [4712]
        finally:
            path.unlink()

    play(scene)


def test_a_flood_does_not_hold_up_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 2)

    async def scene() -> None:
        with listening(tmp_path / "s") as heard:
            for _ in range(5):
                send(tmp_path / "s", GOOD)
            seen = []
            while len(heard) < 5:
                await asyncio.sleep(0)
                seen.append(len(heard))
            assert {2, 4} <= set(seen)

    play(scene)


def test_a_path_that_is_too_long_is_an_oserror(tmp_path: Path) -> None:
    async def scene() -> None:
        with pytest.raises(OSError, match="too long"):
            ExitSocket(tmp_path / ("x" * 100), lambda _: None)

    play(scene)


@pytest.mark.parametrize("first", ["status", "end"])
@pytest.mark.parametrize(
    ("status", "said"),
    [(9, "was killed by signal 9 (SIGKILL)"), (3 << 8, "ended without a farewell, exit code 3")],
)
def test_the_status_describes_the_end_whichever_comes_first(first: str, status: int, said: str) -> None:
    async def scene() -> None:
        async with node() as it:
            it.workers._expects_exits = True
            pid = await it.started(task(0))
            other = await it.started(task(1))
            if first == "status":
                it.workers.hear_exit(TaskExit(1, 1, 0, pid, status))
            os.kill(pid, signal.SIGKILL)
            if first == "end":
                await until(lambda: it.workers._tasks)
                it.workers.hear_exit(TaskExit(1, 1, 0, pid, status))
            await until(lambda: it.of(e.WorkerExited))
            (end,) = it.of(e.WorkerExited)
            assert end.rank == 0 and end.reason == f"process {pid} {said}"
            assert it.workers._lives[1, 1].status is None and other != pid

    play(scene)


def test_a_status_that_does_not_come_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with node() as it:
            it.workers._expects_exits = True
            pid = await it.started(task(0))
            os.kill(pid, signal.SIGKILL)
            await until(lambda: it.of(e.WorkerExited))
            assert "killed or crashed" in it.of(e.WorkerExited)[0].reason

    play(scene)


def test_without_the_plugin_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrec.agent.workers.STATUS_TIMEOUT_S", 3600)

    async def scene() -> None:
        async with node() as it:
            pid = await it.started(task(0))
            os.kill(pid, signal.SIGKILL)
            await until(lambda: it.of(e.WorkerExited))

    play(scene)


def test_what_we_killed_ourselves_has_our_reason_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrec.agent.workers.STATUS_TIMEOUT_S", 3600)

    async def scene() -> None:
        async with node() as it:
            it.workers._expects_exits = True
            await it.started(task(0))
            it.workers.kill(0, 1, "silent")
            await until(lambda: it.of(e.WorkerExited))
            assert it.of(e.WorkerExited)[0].reason == "silent"

    play(scene)


def test_the_group_is_killed_before_anybody_waits_for_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrec.agent.workers.STATUS_TIMEOUT_S", 3600)

    async def scene() -> None:
        async with node() as it:
            it.workers._expects_exits = True
            pid = await it.started(task(0), ("sh", "-c", "sleep 60 & echo $! > child; echo started; wait"))
            child = int(Path("child").read_text())
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child))
            assert it.of(e.WorkerExited) == []
            it.workers.hear_exit(TaskExit(1, 1, 0, pid, 9))
            await until(lambda: it.of(e.WorkerExited))

    play(scene)


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_admitted_agent_has_one_and_a_lost_one_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashrec.transport.paths import socket_path
    from tests.agent.test_app import launched, manager

    async def scene() -> None:
        async with manager(monkeypatch) as made:
            agent = made.agent()
            channel, messages = await made.lives.get()
            path = exit_socket_path(socket_path("key", "n1"))
            assert not path.exists(), "not before it is admitted"
            channel.send(made.welcome())
            pid = await launched(made, channel, messages)
            send(path, f"FLASHREC1 task_exit 1 1 0 {pid} 11\n".encode())
            os.kill(pid, signal.SIGKILL)
            async for message in messages:
                channel.send(m.HeartbeatAck(1))
                if isinstance(message, e.WorkerExited):
                    assert "killed by signal 11 (SIGSEGV)" in message.reason
                    break
            channel.send(m.Stop("over"))
            assert await agent == 0
            assert not path.parent.exists()

    play(scene)
