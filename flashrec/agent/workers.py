"""The workers of one node: who may start, who runs, who has spoken last, who has gone and how.

A worker's life: expected (the manager said so) → started (its launcher asked, we hold a pidfd) → joined (its runtime
said hello) → gone (the pidfd says so). Whatever the runtime sends is relayed to the manager; whatever the manager
announces goes to every runtime, and what was announced before a runtime said hello is repeated to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from flashrec.agent import stacks
from flashrec.agent.bundle import Bundle
from flashrec.agent.exits import TaskExit, describe_status
from flashrec.agent.life import Life, Worker
from flashrec.agent.parked import ParkedTask, ParkedTasks
from flashrec.agent.process import WatchedProcess
from flashrec.core import events
from flashrec.core.types import Assignment
from flashrec.transport.paths import memory_directory, state_path
from flashrec.wire import messages as m

EXPECT_TIMEOUT_S = 30.0
LAST_WORDS_TIMEOUT_S = 1.0
STATUS_TIMEOUT_S = 0.05  # for the plugin's word, where it is known to come
LATE_S = 1.0  # our own loop was held up for so long: nobody's silence is counted for that time
TAKEN_TIMEOUT_S = 3.0  # for a parked task to say that it goes on as its rank
RAISED_GRACE_S = 0.5  # from an exception that ends the script to the end of its process
STACKS_TIMEOUT_S = 1.0  # for those of a worker that this agent is about to kill


class Workers:
    """All workers of this node, for one life of the agent. `relay` sends to the manager."""

    def __init__(
        self, welcome: m.AgentWelcome, address: str, socket: Path, relay: Callable[[m.Sendable], None],
        *, expects_exits: bool = False,
    ) -> None:  # fmt: skip
        self._welcome, self._address, self._socket = welcome, address, socket
        self._bundle = Bundle(relay, self._num_joined)
        self._relay = self._bundle.relay
        self._expects_exits = expects_exits
        self.generation = self._announced = welcome.generation
        self._expected: dict[tuple[int, int], Assignment] = {}
        self._expectation_changed = asyncio.Event()
        self._lives: dict[tuple[int, int], Life] = {}
        self._keys: list[m.KeysPushed] = []
        self._orphaned: list[Life] = []  # whose group is still to be killed
        self._closed = ""
        self._parked = ParkedTasks(Path(welcome.output_dir), welcome.env, relay)
        self._tasks: set[asyncio.Task[None]] = set()
        self._beat_at = time.monotonic()

    def _num_joined(self) -> int:
        return sum(life.channel is not None for life in self._lives.values())

    # ---- what workers say -------------------------------------------------------------------------------------

    async def serve(self, channel: Worker) -> None:
        """One connection: a launcher's question, or a runtime for as long as it lives."""
        life: Life | None = None
        messages = channel.messages()
        async for message in messages:
            match message:
                case m.TaskStarting() if life is None:
                    await self._start(channel, message)
                    return
                case m.TaskParking() if life is None:
                    await self._parked.serve(channel, message, messages)
                    return
                case m.WorkerHello() if life is None:
                    life = self._join(channel, message)
                    if life is None:
                        return
                case _ if life is None or not self._speaks_for(life, message):
                    break  # speech before hello, a second hello, or for somebody else
                case m.WorkerBeat():
                    life.hear(message, time.monotonic())
                case _:
                    self._hear(life, message)
        if life is not None:
            life.spoken_out.set()

    @staticmethod
    def _speaks_for(life: Life, message: m.Sendable) -> bool:
        said = (getattr(message, "rank", None), getattr(message, "incarnation", None))
        return said == (life.assignment.rank, life.assignment.incarnation)

    async def _start(self, channel: Worker, question: m.TaskStarting) -> None:
        assignment = await self._await_expectation(question.launch, question.local_id)
        if assignment is None:
            channel.send(
                m.TaskRefused(self._closed or f"nobody asked for task {question.local_id} of launch {question.launch}")
            )
            await channel.drain_and_close()
            return
        try:
            # never the pid it says: inside a container that is another process here, and 1 would mean everybody
            process = WatchedProcess(channel.peer_pid)
        except ProcessLookupError:
            return
        except OSError as err:
            channel.send(m.TaskRefused(f"the agent cannot watch process {channel.peer_pid}: {err.strerror}"))
            await channel.drain_and_close()
            return
        self._adopt(channel, Life(question.launch, assignment, process, self._socket, time.monotonic()))
        await channel.drain_and_close()

    def _adopt(self, channel: Worker, life: Life) -> None:
        """From now on this process is a worker."""
        assignment = life.assignment
        self._lives[life.who] = life
        self._kill_groups()
        asyncio.get_running_loop().add_reader(life.process.fileno(), self._ended, life)
        name = f"rank-{assignment.rank}.{assignment.incarnation}.log"
        output = str(Path(self._welcome.output_dir) / name)
        # first the manager: a short task can end, and srun with it, before the next line is reached
        self._relay(events.WorkerStarted(assignment.rank, assignment.incarnation, life.process.pid))
        channel.send(m.TaskAssigned(assignment, self._environment(assignment), output))

    def use_parked(self, order: m.UseParked) -> None:
        """A parked task gets a rank; if there is none (any more), the manager is told."""
        parked = self._parked.take(order.launch, order.local_id)
        if parked is not None:
            life = Life(order.launch, order.task, parked.process, self._socket, time.monotonic())
            self._adopt(parked.channel, life)
            self._start_task(self._await_taken(parked, life))

    async def _await_taken(self, parked: ParkedTask, life: Life) -> None:
        try:
            async with asyncio.timeout(TAKEN_TIMEOUT_S):
                await parked.taken.wait()
        except TimeoutError:
            self.kill(*life.who, f"parked, and did not take its rank within {TAKEN_TIMEOUT_S:g} s")
        await parked.channel.drain_and_close()

    def end_parking(self, order: m.ParkingOver) -> None:
        """The manager does not want the parked tasks of one launch, or none at all."""
        if order.launch:
            self._parked.end(order.launch)
        else:
            self._parked.close(order.reason)

    async def _await_expectation(self, launch: int, local_id: int) -> Assignment | None:
        """A task may be faster than the manager's word about it."""
        try:
            async with asyncio.timeout(EXPECT_TIMEOUT_S):
                while not self._closed and (launch, local_id) not in self._expected:
                    await self._expectation_changed.wait()
        except TimeoutError:
            return None
        return None if self._closed else self._expected.pop((launch, local_id), None)

    def _environment(self, assignment: Assignment) -> dict[str, str]:
        size = {"WORLD_SIZE": str(assignment.world_size)} if assignment.world_size else {}
        resized = {"FLASHREC_RESIZED": str(assignment.resized), "FLASHREC_FORMER": str(assignment.former)}
        return {
            **self._welcome.env,
            **size,
            **(resized if assignment.resized else {}),
            "FLASHREC_SOCKET": str(self._socket),
            "RANK": str(assignment.rank),
            "LOCAL_RANK": str(assignment.local_rank),
            "FLASHREC_INCARNATION": str(assignment.incarnation),
            "FLASHREC_GENERATION": str(assignment.generation),
            "FLASHREC_JOINS": "1" if assignment.joins else "0",
        }

    def _join(self, channel: Worker, hello: m.WorkerHello) -> Life | None:
        life = self._lives.get((hello.rank, hello.incarnation))
        if life is None or life.kill_reason:
            channel.abort("unknown worker")
            return None
        if life.channel is not None:
            channel.abort("this worker has joined already")
            return None
        life.join(channel, hello.stacks_signal, time.monotonic())
        timing = self._welcome
        channel.send(
            m.WorkerWelcome(
                self._announced, life.assignment.world_size or timing.world_size, self._address,
                timing.heartbeat_interval_s, timing.lease_s,
            )
        )  # fmt: skip
        for keys in self._keys:
            if hello.rank in keys.members:
                channel.send(keys)
        self._relay(events.WorkerJoined(hello.rank, hello.incarnation))
        return life

    def _hear(self, life: Life, message: m.ToAgentFromWorker) -> None:
        life.heard_at = time.monotonic()
        if isinstance(message, m.WorkerFarewell):
            if life.farewell == "none":
                life.farewell = "orderly"
            return
        if isinstance(message, events.WorkerRaised):
            life.farewell = "raised"
            if message.raised.step > 0:
                self._start_task(self._hasten(life))
        elif isinstance(message, events.WorkerFinished):
            life.farewell = "finished"
        elif isinstance(message, events.HandedOver):
            message = self._seen_here(message)
        self._relay(message)

    def _seen_here(self, said: events.HandedOver) -> m.ToAgentFromWorker:
        """A container may have a memory of its own, of which nothing is left for the next life."""
        path = state_path(self._socket, said.rank, said.generation)
        if path.exists():
            return said
        return events.NotHandedOver(said.rank, said.incarnation, said.generation, f"the agent does not see {path}")

    # ---- how workers end --------------------------------------------------------------------------------------

    def _ended(self, life: Life) -> None:
        asyncio.get_running_loop().remove_reader(life.process.fileno())
        life.gone.set()
        self._orphaned.append(life)
        self._kill_groups()
        self._start_task(self._bury(life))

    async def _hasten(self, life: Life) -> None:
        """An exception has ended its script in the midst of training, and its peers wait for its replacement, not for
        what the interpreter does at its end (docs/decisions/0040-an-exception-has-half-a-second.md)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RAISED_GRACE_S):
                await life.gone.wait()
        if not life.gone.is_set():
            life.is_hastened = True
            life.process.kill()

    def _kill_groups(self) -> None:
        """What a worker leaves behind ends with it. But the first task of a job step is still in Slurm's group, where
        its neighbours are too until they ask who they are: so these must have started before."""
        awaited = {launch for launch, _ in self._expected}
        ready = [life for life in self._orphaned if life.process.leads_session or life.launch not in awaited]
        self._orphaned = [life for life in self._orphaned if life not in ready]
        for life in ready:
            life.process.kill_group()

    async def _bury(self, life: Life) -> None:
        """Hear the last words first: the process is gone, but what it sent may still be in the socket."""
        if life.joined:
            try:
                async with asyncio.timeout(LAST_WORDS_TIMEOUT_S):
                    await life.spoken_out.wait()
            except TimeoutError:
                pass
        if self._expects_exits and not life.kill_reason:
            try:
                async with asyncio.timeout(STATUS_TIMEOUT_S):
                    await life.status_told.wait()
            except TimeoutError:
                pass
        life.process.close()
        life.remove_files()
        self._lives.pop(life.who, None)
        self._relay(events.WorkerExited(*life.who, life.farewell, life.joined, life.kill_reason or _describe(life)))

    def hear_exit(self, ended: TaskExit) -> None:
        """The plugin says how a task ended; it may do so before or after we see that it has."""
        self._expects_exits = True
        for life in self._lives.values():
            if life.process.pid == ended.pid:
                life.status = ended.status
                life.status_told.set()

    def kill(self, rank: int, incarnation: int, reason: str) -> None:
        """SIGKILL one worker; its end is then reported like any other."""
        self._expected = {k: a for k, a in self._expected.items() if (a.rank, a.incarnation) != (rank, incarnation)}
        self._kill_groups()
        life = self._lives.get((rank, incarnation))
        if life is not None and not life.kill_reason:
            life.kill_reason = reason
            life.process.kill()

    def close(self, reason: str) -> None:
        """This life of the agent is over: kill every worker, admit nobody any more."""
        self._closed = reason
        self._bundle.flush()
        self._expectation_changed.set()
        self._expected = {}
        self._parked.close(reason)
        self._kill_groups()
        for rank, incarnation in list(self._lives):
            self.kill(rank, incarnation, reason)

    async def closed(self, timeout_s: float = 5.0) -> None:
        """Wait (bounded) until every killed worker has really gone."""
        deadline = time.monotonic() + timeout_s
        while (self._lives or self._tasks or not self._parked.is_empty) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    # ---- what the manager says --------------------------------------------------------------------------------

    def expect(self, order: m.ExpectTasks) -> None:
        for local_id, assignment in enumerate(order.tasks):
            self._expected[order.launch, local_id] = assignment
        self._expectation_changed.set()
        self._expectation_changed = asyncio.Event()

    def announce(self, message: m.Message) -> None:
        """Tell every joined worker; a newer generation also drops the keys of the older one. One that is to begin at a
        step boundary begins with its plan: until then the older one is in use."""
        if isinstance(message, m.Fence):
            self._announced = max(self._announced, message.generation)
            if not message.at_boundary:
                self._begin(message.generation)
        elif isinstance(message, m.PlanPublished):
            self._begin(message.plan.generation)
        elif isinstance(message, m.Resume):
            self.forget_states()
        for life in self._lives.values():
            if life.channel is not None:
                life.channel.send(message)

    def _begin(self, generation: int) -> None:
        if generation > self.generation:
            self.generation, self._keys = generation, []

    def forget_states(self) -> None:
        """Nothing that was put aside is needed any more."""
        shutil.rmtree(memory_directory(self._socket), ignore_errors=True)

    def push_keys(self, keys: m.KeysPushed) -> None:
        if keys.generation != self.generation:
            return
        self._keys.append(keys)
        for life in self._lives.values():
            if life.channel is not None and life.assignment.rank in keys.members:
                life.channel.send(keys)

    def answer(self, value: m.CounterValue | m.CommitAnswered) -> None:
        """To the worker that asked, if it still lives."""
        life = self._lives.get((value.rank, value.incarnation))
        if life is not None and life.channel is not None:
            life.channel.send(value)

    # ---- heartbeats -------------------------------------------------------------------------------------------

    def beat(self) -> tuple[m.WorkerBeat, ...]:
        """Renew the workers' lease, judge their silence, and return their newest tags."""
        now = time.monotonic()
        late_s = now - self._beat_at - self._welcome.heartbeat_interval_s
        self._beat_at = now
        tags = []
        for life in list(self._lives.values()):
            if late_s > LATE_S:
                life.forgive(late_s, now)
            if life.channel is not None:
                life.channel.send(m.AgentBeat())
            tags.append(life.tag(now))
            if life.channel is not None and not life.is_doomed:
                self._judge_silence(life, tags[-1])
        return tuple(tags)

    def _judge_silence(self, life: Life, tag: m.WorkerBeat) -> None:
        silent_s = tag.silent_s
        if silent_s > self._welcome.worker_stopped_s and life.is_stopped():
            self._end(life, f"worker stopped (process state T) and silent for {silent_s:.1f} s")
        elif silent_s > self._welcome.worker_silent_s and not tag.quiet:
            self._end(life, f"worker silent for {silent_s:.1f} s")

    def _end(self, life: Life, reason: str) -> None:
        """Kill it, and first say where it is."""
        life.is_doomed = True
        self._start_task(self._show_and_kill(life, reason))

    async def _show_and_kill(self, life: Life, reason: str) -> None:
        await self._show(life, STACKS_TIMEOUT_S)
        self.kill(*life.who, reason)

    def show_stacks(self, asked: m.StacksAsked) -> None:
        """Look what a worker is doing and tell the manager. It may be gone: then its end says so."""
        life = self._lives.get((asked.rank, asked.incarnation))
        if life is not None:
            self._start_task(self._show(life, asked.timeout_s))

    async def _show(self, life: Life, timeout_s: float) -> None:
        how, text = await stacks.take(life.pid, life.stacks_signal, life.stacks_path, timeout_s)
        self._relay(m.StacksTaken(*life.who, how, text))

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _describe(life: Life) -> str:
    process = f"process {life.process.pid}"
    status = "" if life.status is None or life.is_hastened else describe_status(life.status)
    if life.farewell == "none" and status.startswith("killed"):
        return f"{process} was {status}"
    how = f", {status}" if status else ""
    if life.farewell == "none":
        return f"{process} ended without a farewell{how or ' (killed or crashed)'}"
    if life.farewell == "raised":
        return f"{process} ended with an exception{how}"
    return f"{process} ended{how}"
