"""The manager of one job: the edge around the pure machine. Receive, decode, handle, perform, arm one timer.

It owns the agents' job step, the workers' job steps, the journal and the job's output. Everything is decided in
`core.machine` (what to do) and `core.detection` (who is lost, carried out in `manager.verdicts`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from flashrec.core import events as e
from flashrec.core.detection import Detector
from flashrec.core.machine import Machine
from flashrec.core.membership import Slot
from flashrec.manager.agents import AgentKeeper
from flashrec.manager.commits import CommitDesk
from flashrec.manager.companions import Companions
from flashrec.manager.control import ControlPlane, Link
from flashrec.manager.departures import Departures
from flashrec.manager.fabric import Fabric, FabricError
from flashrec.manager.hangs import HangWatch
from flashrec.manager.health import HealthDesk
from flashrec.manager.journal import Journal
from flashrec.manager.launches import Launches
from flashrec.manager.output import OutputFollower
from flashrec.manager.output_files import OutputFiles
from flashrec.manager.pace import rest_s
from flashrec.manager.parking import Parking
from flashrec.manager.performer import Performer
from flashrec.manager.rendezvous import Rendezvous
from flashrec.manager.request import Request, RequestError, Shape
from flashrec.manager.requests import Requests
from flashrec.manager.status import snapshot, write_status
from flashrec.manager.steps import Contact, Launcher, LocalLauncher, SlurmLauncher
from flashrec.manager.verdicts import Verdicts
from flashrec.manager.voice import say
from flashrec.manager.welcome import rank_environment, tags_every, welcome
from flashrec.manager.wishes import Wishes
from flashrec.slurm.choice import make_scheduler
from flashrec.slurm.client import SlurmClient
from flashrec.transport.handshake import new_secret, write_secret
from flashrec.transport.stream import listen_tcp
from flashrec.wire import frames
from flashrec.wire import messages as m

EXIT_INTERNAL = 70
EXIT_USAGE = 64
STOP_TIMEOUT_S = 5.0
STEP_END_TIMEOUT_S = 1.0
COMPANIONS_END_TIMEOUT_S = 20.0
STATUS_INTERVAL_S = 1.0
MAX_ACK_INTERVAL_S = 1.0  # an agent's lease is renewed at least so often
_EVERY_ADDRESS = ("", "0.0.0.0", "::")  # good to listen on, not to connect to


class Manager:
    """Runs one job from the first launch to the last exit. nodes: in order of preference, this node last."""

    def __init__(
        self, request: Request, shape: Shape, nodes: tuple[str, ...], job_dir: Path, host: str, job_id: int | None,
        files: OutputFiles | None = None,
    ) -> None:  # fmt: skip
        self.request, self.shape, self.nodes, self.job_dir, self.job_id = request, shape, nodes, job_dir, job_id
        self._host, self._config = host, request.config
        self.logs = job_dir / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(job_dir / "journal.jsonl", say)
        self._secret, self._secret_file = new_secret(), job_dir / "secret"
        self._secret_file.unlink(missing_ok=True)
        write_secret(self._secret_file, self._secret)
        self._key = f"{job_id or 'local'}-{secrets.token_hex(4)}"
        self.machine = Machine(self._config.recovery, self._config.pool.limits() if job_id is not None else None)
        home = os.environ.get("SLURMD_NODENAME", "") if job_id is not None else ""
        self.detector = Detector(self._config.detection, home)
        self.verdicts = Verdicts(self, self.detector, self._config.detection)
        self.rendezvous = Rendezvous(self._nodes_of)
        self.health, self._health_rules = HealthDesk(self, self._config.health), self._config.health.rules()
        self.control = ControlPlane(
            nodes,
            self.detector,
            self.rendezvous,
            self._welcome,
            self.health.pass_on,
            self.verdicts.judge,
            self.journal.note,
        )
        self.control.on(m.NodeHealth, self.health.hear)
        self.control.on(m.PeersBlamed, self.verdicts.peers_blamed)
        self.control.on(m.MirrorsMeasured, self._mirrors_measured)
        beat_s = self._config.detection.heartbeat_interval_s
        every = tags_every(shape.num_active * shape.ranks_per_node, beat_s)
        self.hangs = HangWatch(self, self._config.hangs, every, beat_s)
        self.control.on(m.StacksTaken, self.hangs.stacks_taken)
        self.control.hear_tags = self.hangs.heard
        self.control.acts = self._acts
        self.control.ack_interval_s = min(MAX_ACK_INTERVAL_S, self._config.control.lease_s / 10)
        self.control.on(m.CommitAsked, CommitDesk(self, self._config.control.lease_s / 2).hear)
        self.output = OutputFollower(self.logs, self._config.output.follow, files=files)
        self._over = asyncio.Event()
        self.fabric: Fabric | None = None
        self._launches: Launches | None = None
        self._parking: Parking | None = None
        self._agents: AgentKeeper | None = None
        self._departures: Departures | None = None
        self._companions: Companions | None = None
        self._performer: Performer
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for: float | None = None

    # ---- the life of a job ------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Return the exit code of the job. Raises RequestError if nobody could reach us."""
        try:
            return await self._run()
        finally:
            await self._end_companions()
            self._secret_file.unlink(missing_ok=True)
            self.journal.close()

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unhandled)
        host, port = self._config.control.host or self._host, self._config.control.port
        try:
            server = await listen_tcp(
                host, port, self._secret, frames.to_manager, self.control.serve, self.control.refused
            )
        except OSError as err:
            self.journal.discard()
            raise RequestError(
                f"cannot listen on {host}, port {port or 'any'}: {err} (settings control.host and control.port)"
            ) from err
        client = SlurmClient() if self.job_id is not None else None
        pool = self._config.pool
        if client is not None and self.job_id is not None and pool.reservation:
            self._companions = Companions(
                self, self.job_id, pool.reservation, pool.wait_s, self._config.detection.slurm_poll_interval_s, client,
                make_scheduler(os.environ), self.journal.note,
            )  # fmt: skip
        launcher = self._launcher(server.sockets[0].getsockname()[1])
        self._launches = Launches(launcher, self.control.send, self._slot_of, self.emit, self.journal.note)
        self._parking = Parking(
            self, self._config.hot, self.request.command, launcher,
            self._launches.begin, self.journal.note,
        )  # fmt: skip
        self._agents = AgentKeeper(self, self._config, launcher, client)
        self._departures = Departures(self, self._agents)
        self._performer = Performer(
            self, self._launches, self._parking, self._agents, self._departures, self._companions, self._over.set
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._interrupted, number)
        work = [self.verdicts.run(), self._agents.run(), self.output.run(), self._keep_status(), self._parking.run()]
        work += [Wishes(Requests(self, self._agents, self._departures), self.job_dir).run(), self.hangs.run()]
        work += [self._companions.run()] if self._companions is not None else []
        tasks = [*await self._start_fabric(), *(loop.create_task(coroutine) for coroutine in work)]
        for task in tasks:
            task.add_done_callback(self._a_task_ended)
        self._note_start()
        self.emit(e.JobStarted(self.nodes, self.shape.num_active, self.shape.ranks_per_node))
        await self._over.wait()
        await self._wind_down(server, tasks)
        return self._exit_code()

    async def _start_fabric(self) -> list[asyncio.Task[None]]:
        """Heartbeats over MPI, if they are wanted. Raises RequestError if they are required and cannot be had."""
        settings = self._config.fabric
        if settings.mpi == "off" or (settings.mpi == "auto" and self.job_id is None):
            why = "fabric.mpi is off" if settings.mpi == "off" else "local nodes are one machine"
            self.journal.note("fabric is not watched", why=why)
            return []
        self.fabric = Fabric(
            settings, self._host, self.control.links, self.detector, self.control.send, self.verdicts.judge,
            self.journal.note, lambda why: self.emit(e.StopRequested(why, EXIT_USAGE)),
        )  # fmt: skip
        self.control.hear_fabric = self.fabric.said
        task = asyncio.create_task(self.fabric.run())
        if settings.mpi == "required":
            try:
                await self.fabric.usable()
            except FabricError as err:
                self.journal.discard()
                raise RequestError(f"fabric.mpi is required, and the fabric cannot be watched: {err}") from err
        return [task]

    def _launcher(self, port: int) -> Launcher:
        wanted = self._config.control.host
        host = self._host if wanted in _EVERY_ADDRESS else wanted
        contact = Contact(
            f"{host}:{port}", self._key, self._secret_file, self._config.control.reconnect_s, tempfile.gettempdir()
        )
        if self.job_id is None:
            return LocalLauncher(contact, self.request.command, self.logs)
        companion_of = self._companions.job_of if self._companions is not None else lambda _: None
        return SlurmLauncher(
            self.job_id, contact, self.request.command, self.request.srun_options, self.logs, companion_of
        )

    async def _wind_down(self, server: asyncio.Server, tasks: list[asyncio.Task[None]]) -> None:
        """Everything stops: workers by their agents, agents by our word, job steps by themselves or by force."""
        assert self._launches is not None and self._agents is not None and self._parking is not None
        self.control.close(m.Stop(self.machine.stop_reason.splitlines()[0]))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.control.links and time.monotonic() < deadline:
            await asyncio.sleep(0.02)  # an agent's connection ends when its last worker has gone
        await asyncio.gather(
            self._launches.stop(STEP_END_TIMEOUT_S), self._parking.stop(STEP_END_TIMEOUT_S),
            self._agents.stop(STEP_END_TIMEOUT_S), self._end_companions(),
        )  # fmt: skip
        server.close()
        await asyncio.to_thread(self.output.copy, final=True)
        await write_status(self.job_dir, self._snapshot)
        self.journal.note("job over", exit_code=self.machine.exit_code, reason=self.machine.stop_reason)

    async def _end_companions(self) -> None:
        """On every way out, so it may be called twice."""
        if self._companions is not None:
            try:
                async with asyncio.timeout(COMPANIONS_END_TIMEOUT_S):
                    await self._companions.stop()
            except TimeoutError:
                say("companion jobs may be left: Slurm did not answer in time")

    def _exit_code(self) -> int:
        """The machine's verdict; if that is good, the code with which the script itself ended its job step."""
        code = self.machine.exit_code or 0
        say(self.machine.stop_reason if code else f"done: {self.machine.stop_reason}")
        if code == 0 and self.machine.generation == 1 and self._launches is not None:
            return self._launches.worst_code
        return code

    # ---- receive, handle, perform -----------------------------------------------------------------------------

    def emit(self, event: e.AnyEvent) -> None:
        """Give one event to the machine and carry out what it asks."""
        self.emit_all((event,))

    def emit_all(self, events: Sequence[e.AnyEvent]) -> None:
        """The same for events of the same moment, one after the other."""
        self.verdicts.flush()
        now = time.monotonic()
        for event in events:
            asked = self.machine.handle(event, now)
            if asked or not isinstance(event, e.TimePassed):
                self.journal.event(event, now, self.machine.generation, self.machine.phase)
            for effect in asked:
                self.journal.effect(effect, self.machine.generation)
                self._performer.perform(effect)
            if isinstance(event, e.WorkerStarted) and self._parking is not None:
                self._parking.started(event.rank, event.incarnation)
        self._arm()

    def _arm(self) -> None:
        deadline = self.machine.next_deadline()
        if self._timer is not None:
            if deadline == self._armed_for:
                return
            self._timer.cancel()
        self._armed_for = deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - time.monotonic()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._deadline_came)

    def _deadline_came(self) -> None:
        self._timer = None
        self.emit(e.TimePassed())

    # ---- nodes from a pool ------------------------------------------------------------------------------------

    def node_came(self, request: int, node: str) -> None:
        """Slurm has granted a node: it is ours, and an agent is started there."""
        assert self._agents is not None
        self.nodes = (*(known for known in self.nodes if known != node), node)
        self.control.include(node)
        self.emit(e.NodeGranted(request, node))
        self._agents.include(node)

    def is_member(self, node: str) -> bool:
        """The node is in this job, and in use or ready for it."""
        return node in self.nodes and self.detector.state_of(node) in ("alive", "suspect")

    def agent_failed(self, node: str, said: str) -> None:
        if self._companions is not None:
            self._companions.agent_failed(node, said)

    def _mirrors_measured(self, link: Link, said: m.MirrorsMeasured) -> None:
        self.journal.note("mirrors", node=link.node, **msgspec.structs.asdict(said))

    def say(self, text: str) -> None:
        say(text)

    def abandon(self, node: str) -> None:
        """A node is lost: the job steps that include it go on without their srun."""
        assert self._launches is not None and self._agents is not None and self._parking is not None
        self._agents.abandon(node)
        self._launches.abandon(node)
        self._parking.abandon(node)

    def slurm_said(self, node: str, states: frozenset[str]) -> None:
        self.verdicts.slurm_said(node, states)
        if self._departures is not None:
            self._departures.slurm_said(node, states)

    def report_faulty(self, node: str, reason: str) -> str:
        """Tell the administrators of this cluster that a node is faulty; '' or why that cannot be."""
        return self.verdicts.report_faulty(node, reason)

    # ---- small things -----------------------------------------------------------------------------------------

    def _slot_of(self, rank: int, incarnation: int) -> Slot | None:
        slots = self.machine.members.slots
        if not 0 <= rank < len(slots):
            return None  # of a larger world than this one
        slot = slots[rank]
        if slot.incarnation == incarnation and slot.state == "gone":
            return slot
        return self.machine.members.life(rank, incarnation)

    def _acts(self, rank: int, incarnation: int) -> bool:
        """This life of a rank trains; in a planned swap a successor does so only after the resume."""
        slots = self.machine.members.slots
        slot = slots[rank] if 0 <= rank < len(slots) else None
        return slot is not None and slot.incarnation == incarnation and slot.predecessor is None

    def _nodes_of(self, rank: int) -> tuple[str, ...]:
        """Where the lives of a rank that take part in a plan are: its worker, and a predecessor that stands by."""
        slots = self.machine.members.slots
        slot = slots[rank] if 0 <= rank < len(slots) else None
        if slot is None or slot.predecessor is None:  # as good as always
            return (slot.node,) if slot is not None and slot.is_live else ()
        return tuple(life.node for life in (slot, slot.predecessor) if life.is_live)

    def _welcome(self, incarnation: int) -> m.AgentWelcome:
        world_size = self.machine.members.world_size
        files = {"FLASHREC_SECRET_FILE": str(self._secret_file), "FLASHREC_JOB_DIR": str(self.job_dir)}
        env = rank_environment(world_size, self.shape.ranks_per_node, self._host) | files
        rules = self._health_rules
        return welcome(self._config, incarnation, self.machine.generation, world_size, self.logs, env, rules)

    def _note_start(self) -> None:
        shape, pool = self.shape, f" and pool {self._config.pool.reservation}" if self._companions is not None else ""
        self.journal.note(
            "job started", job_id=self.job_id, nodes=self.nodes, num_active=shape.num_active,
            ranks_per_node=shape.ranks_per_node, command=self.request.command, pid=os.getpid(),
        )  # fmt: skip
        say(
            f"{shape.num_active * shape.ranks_per_node} ranks on {shape.num_active} nodes, {shape.num_spares} spare"
            f"{pool}, job directory {self.job_dir}"
        )

    async def _keep_status(self) -> None:
        while True:
            took_s = await write_status(self.job_dir, self._snapshot)
            await asyncio.sleep(rest_s(STATUS_INTERVAL_S, took_s))

    def _snapshot(self) -> dict[str, Any]:
        companion_of = self._companions.job_of if self._companions is not None else None
        now = time.monotonic()
        fabric_of = (lambda node: self.detector.fabric_of(node, now)) if self.fabric is not None else None
        return snapshot(
            self.job_id, self.machine, self.detector, self.control.tags, companion_of, self.hangs.note_of, fabric_of,
            self._parking.ready() if self._parking is not None else None,
        )  # fmt: skip

    def _interrupted(self, number: int) -> None:
        self.emit(e.StopRequested(f"interrupted by {signal.Signals(number).name}", 128 + number))

    def _a_task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._internal_error(error)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Whatever raised in a callback or in a task that nobody waits for: a timer, a connection, a launch."""
        error = context.get("exception")
        if isinstance(error, asyncio.CancelledError):
            return  # a connection that was still open at the end
        if isinstance(error, Exception) and not (isinstance(error, OSError) and "socket" in context):
            self._internal_error(error)
        else:  # out of descriptors: the listener itself tries again
            loop.default_exception_handler(context)

    def _internal_error(self, error: BaseException) -> None:
        """Going on without what has just failed would hang sooner or later: end in words and with a code."""
        self.journal.note("internal error", error=repr(error), traceback="".join(traceback.format_exception(error)))
        say(f"internal error: {error!r} (traceback in {self.job_dir / 'journal.jsonl'})")
        self.emit(e.StopRequested(f"internal error: {error!r}", EXIT_INTERNAL))
