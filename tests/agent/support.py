"""An agent's side on real sockets and processes: the real launcher starts real processes, the test is the runtime."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from flashrec.agent.workers import Workers
from flashrec.core.types import Assignment
from flashrec.transport import handshake
from flashrec.transport.paths import socket_directory, socket_path
from flashrec.transport.stream import Channel, listen_unix, private_directory
from flashrec.wire import frames
from flashrec.wire import messages as m

SECRET = b"s" * 32
LIMIT_S = 30  # some scenes start three interpreters, and a machine may be busy
SLEEP = ("sh", "-c", "echo started; exec sleep 60")


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.003)


def task(rank: int, *, life: int = 1, joins: bool = False) -> Assignment:
    return Assignment(rank, rank, life, 1, joins)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Node:
    """Workers behind a unix socket. relayed: what the manager would hear."""

    def __init__(self, welcome: m.AgentWelcome) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fr-"))
        os.environ["TMPDIR"], tempfile.tempdir = str(self.folder), None
        self.socket = socket_path("key", "n1")
        private_directory(socket_directory("key").parent)
        private_directory(socket_directory("key"))
        handshake.write_secret(self.folder / "secret", SECRET)
        self.relayed: list[Any] = []
        self.refusals: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        welcome = msgspec.structs.replace(welcome, output_dir=str(self.folder))
        self.workers = Workers(welcome, "10.0.0.1", self.socket, self._hear)

    def _hear(self, message: m.Sendable) -> None:
        self.relayed += message.said if isinstance(message, m.Relayed) else (message,)

    def launch(
        self, launch: int, local_id: int, command: tuple[str, ...] = SLEEP, group: int | None = None,
        options: tuple[str, ...] = (),
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """What srun does for one task. group: as Popen's process_group. options: of the launcher."""
        argv = [sys.executable, "-m", "flashrec.agent.launch", "--key", "key", "--secret", str(self.folder / "secret"),
                "--launch", str(launch), *options, "--", *command]  # fmt: skip
        environ = os.environ | {"FLASHREC_NODE": "n1", "SLURM_LOCALID": str(local_id)}
        with (self.folder / f"launcher-{len(self.processes)}").open("wb") as log:
            self.processes.append(subprocess.Popen(argv, env=environ, stdout=log, stderr=log, process_group=group))
        return self.processes[-1]

    def said(self, index: int = 0) -> str:
        return (self.folder / f"launcher-{index}").read_text()

    async def started(self, assignment: Assignment, command: tuple[str, ...] = SLEEP) -> int:
        """Launch one task and wait for it; return its pid."""
        launch = len(self.processes) + 1
        self.workers.expect(m.ExpectTasks(launch, (assignment,)))
        process = self.launch(launch, 0, command)
        log = self.folder / f"rank-{assignment.rank}.{assignment.incarnation}.log"
        await until(lambda: log.exists() and log.stat().st_size)
        return process.pid

    async def runtime(self, rank: int, life: int = 1) -> Channel[m.ToWorker]:
        """Connect as the runtime of a worker and say hello."""
        channel = await self.connect()
        channel.send(m.WorkerHello(rank, life, 1))
        return channel

    async def connect(self) -> Channel[m.ToWorker]:
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        await handshake.connect_stream(reader, writer, SECRET)
        return Channel(reader, writer, frames.to_worker, "agent")

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.relayed if isinstance(message, kind)]


@contextlib.asynccontextmanager
async def node(**changes: Any) -> AsyncIterator[Node]:
    former = os.environ.get("TMPDIR")
    fields = {
        "incarnation": 1, "generation": 1, "world_size": 4, "heartbeat_interval_s": 0.25, "lease_s": 10.0,
        "worker_silent_s": 30.0, "worker_stopped_s": 1.0, "output_dir": "", "env": {"WORLD_SIZE": "4"},
    } | changes  # fmt: skip
    made = Node(m.AgentWelcome(**fields))
    server = await listen_unix(
        made.socket, SECRET, frames.to_agent_from_worker, made.workers.serve, made.refusals.append
    )
    try:
        yield made
    finally:
        made.workers.close("over")
        await made.workers.closed()
        server.close()
        for process in made.processes:
            process.kill()
            process.wait()
        os.environ.pop("TMPDIR")
        if former is not None:
            os.environ["TMPDIR"] = former
        tempfile.tempdir = None
        shutil.rmtree(made.folder)
