"""The agent of one node: one connection to the manager, one unix socket for the workers, one timer.

Its life (incarnation) lasts as long as its connection. When that ends, or when the manager has been silent for
`lease_s`, the agent kills its workers (they may have been replaced already), and offers its node again as a fresh life.
After `reconnect_s` without a manager it ends: nobody needs it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time

import flashrec
from flashrec.agent.exits import ExitSocket, TaskExit
from flashrec.agent.fabric import Fabric
from flashrec.agent.health import HealthWatch
from flashrec.agent.probe import Prober
from flashrec.agent.workers import Workers
from flashrec.transport.paths import exit_socket_path, memory_directory, socket_directory, socket_path
from flashrec.transport.stream import Channel, connect_tcp, listen_unix, private_directory
from flashrec.wire import frames
from flashrec.wire import messages as m

log = logging.getLogger("flashrec.agent")
RETRY_S = 0.25


class Agent:
    """Runs until the manager says Stop, refuses us, or is gone for `reconnect_s`."""

    def __init__(
        self, node: str, launch: int, hosts: list[str], port: int, key: str, secret: bytes, reconnect_s: float,
        *, tmp: str = "", expects_exits: bool = False,
    ):  # fmt: skip
        """expects_exits: Slurm's plugin is known to tell how tasks end (else that is learned when it does)."""
        self.node, self.launch, self.hosts, self.port, self.key = node, launch, hosts, port, key
        self._secret, self._reconnect_s = secret, reconnect_s
        self._tmp, self._expects_exits = tmp, expects_exits
        self._socket = socket_path(key, node, tmp)
        self._exits: ExitSocket | None = None
        self._socket_inode = 0
        self._workers: Workers | None = None
        self._health: HealthWatch | None = None
        self._fabric: Fabric | None = None
        self._manager_heard_at = time.monotonic()
        self._exit_code: int | None = None

    async def run(self) -> int:
        """Return the exit code."""
        directory = socket_directory(self.key, self._tmp)
        private_directory(directory.parent)
        private_directory(directory)
        shutil.rmtree(memory_directory(self._socket), ignore_errors=True)  # of an agent that was killed
        await self._live()
        shutil.rmtree(memory_directory(self._socket), ignore_errors=True)
        if self._health is not None:
            self._health.close()
        with contextlib.suppress(OSError):
            directory.rmdir()
        return self._exit_code or 0

    async def _listen(self) -> asyncio.Server:
        """Only an admitted agent takes the node's socket: a second one, that will be refused, must not take it away."""
        server = await listen_unix(
            self._socket, self._secret, frames.to_agent_from_worker, self._serve_worker, log.warning
        )
        self._socket_inode = self._socket.stat().st_ino
        try:
            self._exits = ExitSocket(exit_socket_path(self._socket), self._hear_exit)
        except OSError as err:
            log.warning("how tasks end will not be told: %s", err)
        return server

    def _hear_exit(self, ended: TaskExit) -> None:
        self._expects_exits = True
        if self._workers is not None:
            self._workers.hear_exit(ended)

    def _remove_socket(self) -> None:
        """Unless a new agent of this node has put its own there (a healed node may have both for a moment)."""
        with contextlib.suppress(OSError):
            if self._socket.stat().st_ino == self._socket_inode:
                exit_socket_path(self._socket).unlink(missing_ok=True)
                self._socket.unlink()

    async def _serve_worker(self, channel: Channel[m.ToAgentFromWorker]) -> None:
        if self._workers is not None:
            await self._workers.serve(channel)

    async def _live(self) -> None:
        deadline = time.monotonic() + self._reconnect_s
        while self._exit_code is None:
            for host in self.hosts:
                try:
                    channel = await connect_tcp(host, self.port, self._secret, frames.to_agent, timeout_s=3.0)
                except (OSError, TimeoutError) as err:
                    log.debug("manager at %s:%d: %s", host, self.port, err)
                    continue
                await self._one_life(channel)
                deadline = time.monotonic() + self._reconnect_s
                break
            if time.monotonic() > deadline:
                log.error("no manager for %g s: ending", self._reconnect_s)
                self._exit_code = 1
            if self._exit_code is None:
                await asyncio.sleep(RETRY_S)

    async def _one_life(self, channel: Channel[m.ToAgent]) -> None:
        """From hello to the end of the connection; leaves no worker behind."""
        channel.send(m.AgentHello(self.node, self.launch, os.getpid(), channel.local_address, flashrec.__version__))
        beats: asyncio.Task[None] | None = None
        server: asyncio.Server | None = None
        self._manager_heard_at = time.monotonic()
        prober = Prober(self._secret, self.node, channel.send)
        try:
            messages = channel.messages()  # kept: when it is dropped the connection ends, and our workers still live
            async for message in messages:
                self._manager_heard_at = time.monotonic()
                if isinstance(message, m.AgentWelcome):
                    self._workers = Workers(
                        message, channel.local_address, self._socket, channel.send, expects_exits=self._expects_exits
                    )
                    prober.welcomed(message.incarnation, channel.local_address)
                    self._fabric = self._make_fabric(message.incarnation, channel, prober)
                    server = await self._listen()
                    beats = asyncio.create_task(self._beat(channel, message))
                    beats.add_done_callback(lambda task: _end_with(task, channel))
                    self._watch_health(channel, message)
                    log.info("node %s joined, incarnation %d", self.node, message.incarnation)
                elif isinstance(message, m.ProbeAsked):
                    prober.ask(message)
                else:
                    self._perform(message)
                if self._exit_code is not None:
                    break
        finally:
            prober.close()
            if beats is not None:
                beats.cancel()
            if self._health is not None:
                self._health.end()
            if server is not None:
                server.close()
                if self._exits is not None:
                    self._exits.close()
                    self._exits = None
                self._remove_socket()
            log.info("connection to the manager ended: %s", channel.end_reason or "done")
            if self._workers is not None:
                self._workers.close("the agent lost its manager" if self._exit_code is None else "the job ends")
                await self._workers.closed()
                self._workers = None
            if self._fabric is not None:
                await self._fabric.close()
                self._fabric = None
            channel.abort("life over")

    @staticmethod
    def _make_fabric(incarnation: int, channel: Channel[m.ToAgent], prober: Prober) -> Fabric:
        """Where it finds a way, others can probe this node over the fabric."""

        def say(said: m.Message) -> None:
            channel.send(said)
            if isinstance(said, m.FabricReady) and said.address:
                prober.offer("fabric", said.address)

        return Fabric(incarnation, channel.local_address, say)

    def _watch_health(self, channel: Channel[m.ToAgent], welcome: m.AgentWelcome) -> None:
        if not welcome.health.enabled:
            return
        if self._health is None:
            self._health = HealthWatch(self.node, welcome.health)
        incarnation = welcome.incarnation
        self._health.begin(lambda state, reasons: channel.send(m.NodeHealth(incarnation, state, reasons)))

    async def _beat(self, channel: Channel[m.ToAgent], welcome: m.AgentWelcome) -> None:
        sequence, beat_at = 0, time.monotonic()
        while True:
            now = time.monotonic()
            silent_s, asleep_s, beat_at = now - self._manager_heard_at, now - beat_at, now
            if max(silent_s, asleep_s) > welcome.lease_s:
                # asleep: acknowledgements from before may have been read just now; they are none for today
                why = (
                    f"manager silent for {silent_s:.1f} s" if silent_s >= asleep_s else f"not run for {asleep_s:.1f} s"
                )
                log.error("%s: lease over, stopping all workers", why)
                channel.abort(f"lease over: {why}")
                return
            sequence += 1
            tags = self._workers.beat() if self._workers is not None else ()
            if sequence % welcome.tags_every:
                tags = ()
            sent = self._fabric.sent if self._fabric is not None else (0, 0)
            channel.send(m.AgentHeartbeat(welcome.incarnation, sequence, tags, fabric=sent))
            await asyncio.sleep(welcome.heartbeat_interval_s)

    def _perform(self, message: m.ToAgent) -> None:
        workers = self._workers
        match message:
            case m.AgentRefused():
                log.error("refused by the manager: %s", message.reason)
                self._exit_code = 1
            case m.Stop():
                log.info("stop: %s", message.reason)
                self._exit_code = 0
                if workers is not None:
                    workers.announce(message)
            case m.FabricOffered() | m.FabricPort():
                if self._fabric is not None:
                    self._fabric.take(message)
            case _ if workers is None:
                return
            case m.ExpectTasks():
                workers.expect(message)
            case m.UseParked():
                workers.use_parked(message)
            case m.ParkingOver():
                workers.end_parking(message)
            case m.KillWorkers():
                for rank, incarnation in message.workers:
                    workers.kill(rank, incarnation, message.reason)
            case m.StacksAsked():
                workers.show_stacks(message)
            case m.KeysPushed():
                workers.push_keys(message)
            case m.CounterValue() | m.CommitAnswered():
                workers.answer(message)
            case m.Fence() | m.PlanPublished() | m.Resume() | m.Complete():
                workers.announce(message)


def _end_with(task: asyncio.Task[None], channel: Channel[m.ToAgent]) -> None:
    """An agent that cannot beat any more (and so does not judge its lease) has no life to lead."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("internal error", exc_info=error)
        channel.abort(f"internal error: {error!r}")
