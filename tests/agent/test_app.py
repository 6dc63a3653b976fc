"""The agent's life: it lasts as long as its connection and its lease, and it leaves no worker behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flashrec.agent import app
from flashrec.agent.app import Agent
from flashrec.agent.paths import this_node
from flashrec.core import events as e
from flashrec.transport.handshake import write_secret
from flashrec.transport.paths import MAX_SOCKET_PATH, socket_directory, socket_path
from flashrec.transport.stream import Channel, listen_tcp
from flashrec.wire import frames
from flashrec.wire import messages as m
from tests.agent.support import SECRET, is_running, play, task


class Manager:
    """The other end: each life of the agent is a (channel, messages) pair in `lives`, its hello already read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, 0
        self.lives: asyncio.Queue[tuple[Channel[Any], Any]] = asyncio.Queue()
        self.over = asyncio.Event()
        self.listener: asyncio.Server | None = None

    async def serve(self, channel: Channel[Any]) -> None:
        messages = channel.messages()
        assert isinstance(await anext(messages), m.AgentHello)
        self.lives.put_nowait((channel, _without_probe_places(messages)))
        await self.over.wait()

    def welcome(self, incarnation: int = 1, lease_s: float = 10.0) -> m.AgentWelcome:
        return m.AgentWelcome(incarnation, 1, 2, 0.02, lease_s, 30.0, 1.0, str(self.folder), {})

    def agent(self, reconnect_s: float = 10.0) -> asyncio.Task[int]:
        made = Agent("n1", 1, ["127.0.0.1"], self.port, "key", SECRET, reconnect_s)
        return asyncio.create_task(made.run())


async def _without_probe_places(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Where the agent answers probes (tests/agent/test_probe.py) is of no interest here."""
    async for message in messages:
        if not isinstance(message, m.ProbesOffered):
            yield message


@contextlib.asynccontextmanager
async def manager(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Manager]:
    monkeypatch.setattr(app, "RETRY_S", 0.01)
    with tempfile.TemporaryDirectory(prefix="fr-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        made = Manager(Path(folder))
        made.listener = await listen_tcp("127.0.0.1", 0, SECRET, frames.to_manager, made.serve, print)
        made.port = made.listener.sockets[0].getsockname()[1]
        yield made
        made.over.set()
        made.listener.close()
        tempfile.tempdir = None


async def launched(made: Manager, channel: Channel[Any], messages: Any, launch: int = 1) -> int:
    """One worker (`sleep`) under the agent; its pid."""
    write_secret(made.folder / f"secret{launch}", SECRET)
    channel.send(m.ExpectTasks(launch, (task(0, life=launch),)))
    subprocess.Popen(
        [sys.executable, "-m", "flashrec.agent.launch", "--key", "key", "--secret",
         str(made.folder / f"secret{launch}"), "--launch", str(launch), "--", "sleep", "60"],
        env=os.environ | {"FLASHREC_NODE": "n1", "SLURM_LOCALID": "0"},
    )  # fmt: skip
    async for message in messages:
        channel.send(m.HeartbeatAck(1))
        if isinstance(message, e.WorkerStarted):
            return message.pid
    raise AssertionError("the connection ended")


def test_it_beats_until_it_is_stopped_and_removes_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with manager(monkeypatch) as made:
            agent = made.agent()
            channel, messages = await made.lives.get()
            channel.send(made.welcome())
            beats = [await anext(messages) for _ in range(3)]
            assert [beat.sequence for beat in beats] == [1, 2, 3]
            assert {beat.incarnation for beat in beats} == {1}
            assert socket_path("key", "n1").exists()
            pid = await launched(made, channel, messages)
            channel.send(m.Stop("over"))
            assert await agent == 0
            assert not is_running(pid)
            assert not socket_directory("key").exists()

    play(scene)


def test_its_connection_ends_only_after_its_last_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager takes the end of the connection for the end of every worker on the node."""

    async def scene() -> None:
        async with manager(monkeypatch) as made:
            agent = made.agent()
            channel, messages = await made.lives.get()
            channel.send(made.welcome())
            await launched(made, channel, messages)
            channel.send(m.Stop("over"))
            heard = [message async for message in messages]
            assert [type(message) for message in heard if isinstance(message, e.Event)] == [e.WorkerExited]
            assert await agent == 0

    play(scene)


def test_a_silent_manager_is_the_end_of_the_lease_and_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager is stopped or unreachable: the ranks may already live elsewhere."""

    async def scene() -> None:
        async with manager(monkeypatch) as made:
            agent = made.agent()
            channel, messages = await made.lives.get()
            channel.send(made.welcome(lease_s=0.5))
            pid = await launched(made, channel, messages)
            again, _messages = await made.lives.get()
            assert not is_running(pid), "they end before the node is offered again"
            again.send(m.Stop("over"))
            assert await agent == 0

    play(scene)


def test_an_agent_that_did_not_run_for_longer_than_its_lease_ends_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real agent is stopped and goes on. The manager did not notice, and what it said before lies in the socket."""

    async def scene() -> None:
        async with manager(monkeypatch) as made:
            write_secret(made.folder / "secret", SECRET)
            agent = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "flashrec.agent", "--manager", f"127.0.0.1:{made.port}", "--key", "key",
                "--secret", str(made.folder / "secret"), "--launch", "1", "--die-with-parent",
                env=os.environ | {"FLASHREC_NODE": "n1"}, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            channel, messages = await made.lives.get()
            channel.send(made.welcome(lease_s=2.0))
            pid = await launched(made, channel, messages)
            agent.send_signal(signal.SIGSTOP)
            while " T " not in Path(f"/proc/{agent.pid}/stat").read_text():
                await asyncio.sleep(0.005)
            channel.send(m.HeartbeatAck(2))
            await asyncio.sleep(2.2)
            assert is_running(pid)
            agent.send_signal(signal.SIGCONT)
            while made.lives.empty():
                channel.send(m.HeartbeatAck(3))
                await asyncio.sleep(0.05)
            again, _messages = await made.lives.get()
            assert not is_running(pid), "they end before the node is offered again"
            again.send(m.Stop("over"))
            assert await agent.wait() == 0

    play(scene)


@pytest.mark.parametrize("lease_s", [0.3])
def test_acknowledged_heartbeats_renew_the_lease(lease_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with manager(monkeypatch) as made:
            agent = made.agent()
            channel, messages = await made.lives.get()
            channel.send(made.welcome(lease_s=lease_s))
            end = asyncio.get_running_loop().time() + 3 * lease_s
            while asyncio.get_running_loop().time() < end:
                channel.send(m.HeartbeatAck((await anext(messages)).sequence))
            assert made.lives.empty() and not agent.done()
            channel.send(m.Stop("over"))
            assert await agent == 0

    play(scene)


def test_a_lost_connection_is_the_end_of_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with manager(monkeypatch) as made:
            agent = made.agent()
            channel, messages = await made.lives.get()
            channel.send(made.welcome())
            pid = await launched(made, channel, messages)
            channel.abort("condemned")
            second, messages = await made.lives.get()
            assert not is_running(pid)
            second.send(made.welcome(2))
            assert (await anext(messages)).incarnation == 2
            assert udp_sockets() == 1, "a former life answers no probes"
            second.send(m.Stop("over"))
            assert await agent == 0
            assert udp_sockets() == 0

    play(scene)


def udp_sockets() -> int:
    """Of this process."""
    inodes = {line.split()[9] for line in Path("/proc/self/net/udp").read_text().splitlines()[1:]}
    fds = [Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(fd) for fd in fds if os.path.lexists(fd)]
    return sum(link.removeprefix("socket:[").removesuffix("]") in inodes for link in links)


def test_a_refused_agent_ends_and_leaves_the_socket_of_the_admitted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with manager(monkeypatch) as made:
            first = made.agent()
            channel, messages = await made.lives.get()
            channel.send(made.welcome())
            await anext(messages)
            second = made.agent()
            other, _messages = await made.lives.get()
            other.send(m.AgentRefused("node n1 has an agent already"))
            assert await second == 1
            assert socket_path("key", "n1").exists()
            channel.send(m.Stop("over"))
            assert await first == 0

    play(scene)


def test_without_a_manager_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with manager(monkeypatch) as made:
            made.listener.close()
            await made.listener.wait_closed()
            assert await made.agent(reconnect_s=0.05) == 1

    play(scene)


def test_an_agent_that_cannot_beat_offers_a_fresh_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its beats nobody judges the lease any more."""

    async def scene() -> None:
        async with manager(monkeypatch) as made:
            agent = made.agent()
            channel, messages = await made.lives.get()
            monkeypatch.setattr(app.Workers, "beat", lambda self: 1 / 0)
            channel.send(made.welcome())
            assert [x async for x in messages] == []
            monkeypatch.undo()
            second, _messages = await made.lives.get()
            second.send(m.Stop("over"))
            assert await agent == 0

    play(scene)


def test_a_directory_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with manager(monkeypatch) as made:
            socket_directory("key").parent.mkdir(mode=0o755)
            with pytest.raises(PermissionError):
                await made.agent()

    play(scene)


def test_the_name_of_the_node_is_never_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHREC_NODE", raising=False)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with pytest.raises(LookupError, match="SLURMD_NODENAME"):
        this_node()
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert this_node() == "n7"


def test_a_path_that_is_no_socket_address_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    room = MAX_SOCKET_PATH - len(str(socket_directory("key"))) - len("/.sock")
    assert socket_path("key", "n" * room)
    with pytest.raises(ValueError, match="set TMPDIR to a shorter path"):
        socket_path("key", "n" * (room + 1))


@pytest.mark.parametrize("problem", ["no secret", "no node"])
def test_an_agent_that_cannot_start_says_why(problem: str, tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k not in ("FLASHREC_NODE", "SLURMD_NODENAME")}
    if problem == "no secret":
        environ["FLASHREC_NODE"] = "n1"
    done = subprocess.run(
        [sys.executable, "-m", "flashrec.agent", "--manager", "127.0.0.1:1", "--key", "k", "--secret",
         str(tmp_path / "secret"), "--launch", "1"],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the agent ends: " in done.stderr
    assert ("No such file" if problem == "no secret" else "SLURMD_NODENAME") in done.stderr


def test_it_leaves_the_socket_of_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healed node may have two agents for a moment: the one that ends must not take the other's socket away."""

    async def scene() -> None:
        async with manager(monkeypatch) as made:
            agent = made.agent()
            channel, messages = await made.lives.get()
            channel.send(made.welcome())
            await anext(messages)
            path = socket_path("key", "n1")
            path.rename(path.with_suffix(".old"))  # keeps the inode number taken
            path.touch()
            channel.send(m.Stop("over"))
            assert await agent == 0
            assert path.exists()

    play(scene)
