"""A double of agents and manager for tests: it speaks the wire protocol over unix sockets to real worker processes.

Workers are forked from a server that has torch loaded already (it has no threads), so starting one takes
milliseconds. Everything the workers say is recorded; `await_message` waits for it. The plan is the product's own
decision; what a test wants to delay or to forge it does by replacing `decide` or by `hold`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import msgspec

from flashrec.core import commit, events
from flashrec.core.commit import Impossible
from flashrec.core.types import Plan, Report
from flashrec.transport.handshake import accept_authenticated, new_secret, write_secret
from flashrec.wire import messages as m
from flashrec.wire.frames import FrameReader, encode, frame, to_agent_from_worker

TIMEOUT_S = 60.0
PRELOAD = ["tests.runtime.programs"]  # what the fork server imports; to be added to before the first worker is started
_context = multiprocessing.get_context("forkserver")


def _start_fork_server() -> None:
    """Python 3.11's fork server does not take over sys.path, so what it shall load must be found without it."""
    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    _context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    os.environ.pop("PYTHONPATH")
    if kept is not None:
        os.environ["PYTHONPATH"] = kept


def _stacks(pid: int) -> str:
    command = [str(Path(sys.executable).parent / "py-spy"), "dump", "--native", "--pid", str(pid)]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as err:
        return f"(no stacks: {err})"
    return said.stdout or said.stderr


class Cluster:
    """One job of `world_size` ranks: control plane double, and the worker processes."""

    def __init__(
        self, path: Path, world_size: int, address: str = "127.0.0.1", lease_s: float = 20.0, **env: str
    ) -> None:
        self._env = env
        self.path, self.world_size, self.address, self.lease_s = path, world_size, address, lease_s
        path.mkdir(parents=True, exist_ok=True)
        self.generation = 1
        self.messages: list[tuple[float, int, m.Message]] = []
        self.heartbeats: list[m.WorkerBeat] = []
        self.processes: dict[int, Any] = {}
        self.incarnation = dict.fromkeys(range(world_size), 0)
        self.decide: Callable[[int, dict[int, Report]], Any] = commit.decide
        self.plans: list[Plan] = []
        self.refusals: list[Impossible] = []  # after one of these nothing goes on
        self.resumed = 0  # the newest generation in which training has begun
        self.watch: Callable[[int, m.Message], None] = lambda rank, message: None  # sees each before it has an effect
        self.auto_resume = True
        self.permit: Callable[[m.CommitAsked], m.CommitAnswered] | None = None  # None: no answer
        self.withheld = "-"  # groups whose name begins so are not relayed
        self.successors: dict[int, int] = {}  # rank -> incarnation of the life that is to take it over
        self.retired: dict[int, Any] = {}  # the processes that were taken over
        self._reports: dict[tuple[int, int], Report] = {}
        self._restored: set[int] = set()
        self._finished: set[int] = set()
        self._keys: list[tuple[tuple[int, ...], m.KeysPushed]] = []
        self._counters: dict[tuple[int, str, str], int] = {}
        self._links: dict[tuple[int, int], socket.socket] = {}
        self._changed = threading.Condition(threading.RLock())
        self._is_closed = False
        self.secret = new_secret()
        write_secret(path / "secret", self.secret)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path / "agent"))
        self._listener.listen(64)
        self.beats = True
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    # ---- processes

    def environment(self, rank: int, joins: bool) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "FLASHREC_SOCKET": str(self.path / "agent"),
            "FLASHREC_SECRET_FILE": str(self.path / "secret"),
            "FLASHREC_INCARNATION": str(self.incarnation[rank]),
            "FLASHREC_GENERATION": str(self.generation),
            "FLASHREC_JOINS": "1" if joins else "",
            "FLASHREC_NODE": f"node{rank}",
            **self._env,
        }

    def start(self, program: Callable[..., None], rank: int, joins: bool = False, **config: Any) -> None:
        self.incarnation[rank] += 1
        log = self.path / f"rank{rank}.{self.incarnation[rank]}.log"
        config |= {"out": str(self.path / f"rank{rank}.json")}
        _start_fork_server()
        process = _context.Process(
            target=_child, args=(program, self.environment(rank, joins), str(log), config), daemon=True
        )
        process.start()
        self.processes[rank] = process

    def start_all(self, program: Callable[..., None], **config: Any) -> None:
        for rank in range(self.world_size):
            self.start(program, rank, **config)

    def replace(self, *ranks: int, program: Callable[..., None], **config: Any) -> None:
        """The given ranks are dead: make it known, and start replacements."""
        self.condemn(*ranks)
        for rank in ranks:
            self.start(program, rank, joins=True, **config)

    def start_over(self, program: Callable[..., None], **config: Any) -> None:
        """What the manager does about a loss before training has begun: everybody is started again."""
        with self._changed:
            self._links = {}
            self.generation += 1
            self._reports, self._restored = {}, set()
        for process in self.processes.values():
            process.kill()
            process.join(10)
        self.start_all(program, **config)

    def condemn(self, *ranks: int) -> None:
        """Fence these ranks off, which are dead or are about to be killed."""
        with self._changed:
            self._links = {who: link for who, link in self._links.items() if who[0] not in ranks}
            self.fence()

    def start_successor(self, rank: int, program: Callable[..., None], **config: Any) -> None:
        """A second life of a rank, beside the one that trains; returns when it has built its model and reported."""
        former = self.processes[rank]
        self.start(program, rank, joins=True, **config)
        self.retired[rank], self.successors[rank] = former, self.incarnation[rank]
        self.await_message(events.WorkerReported, rank=rank, incarnation=self.incarnation[rank])

    def await_exit(self, rank: int, timeout_s: float = TIMEOUT_S) -> int:
        self.processes[rank].join(timeout_s)
        code = self.processes[rank].exitcode
        if code is None:
            raise AssertionError(
                f"rank {rank} is still running after {timeout_s} s\n{_stacks(self.processes[rank].pid)}\n{self.logs()}"
            )
        return code

    def await_end(self) -> None:
        for rank in range(self.world_size):
            code = self.await_exit(rank)
            assert code == 0, f"rank {rank} ended with {code}\n{self.logs()}"

    def results(self) -> dict[int, dict[str, Any]]:
        return {rank: json.loads((self.path / f"rank{rank}.json").read_text()) for rank in range(self.world_size)}

    def logs(self) -> str:
        said = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.path.glob("*.log"))]
        return "\n".join([*(f"REFUSED: {refusal}" for refusal in self.refusals), *said])

    def whole_logs(self) -> str:
        return "".join(self.log(rank) for rank in range(self.world_size))

    def log(self, rank: int) -> str:
        return "".join(path.read_text() for path in sorted(self.path.glob(f"rank{rank}.*.log")))

    def marks(self, what: str) -> list[dict[str, str]]:
        """Fields of all time-line marks of this kind, of all ranks."""
        lines = [line for rank in range(self.world_size) for line in self.log(rank).splitlines()]
        return [
            dict(word.split("=", 1) for word in line.split() if "=" in word)
            for line in lines
            if f"mark {what} " in line
        ]

    def close(self) -> None:
        self._is_closed = True
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
        for process in self.processes.values():
            process.join(10)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts, and with it what that one holds
        self._listener.close()
        with self._changed:
            self._links = {}

    # ---- control plane

    def fence(self, reason: str = "test") -> None:
        with self._changed:
            self.generation += 1
            self._reports, self._restored, self.successors = {}, set(), {}
            self.send_all(m.Fence(self.generation, reason))

    def pause(self, *, without: int | None = None) -> None:
        """All ranks are to pause at a step boundary. without: this rank is not told yet."""
        with self._changed:
            self.generation += 1
            self._reports, self._restored = {}, set()
            for rank in range(self.world_size):
                if rank != without:
                    self.send(rank, m.Fence(self.generation, "swap", at_boundary=True))

    def send(self, rank: int, message: m.Message) -> None:
        """To every life of a rank."""
        with self._changed:
            for (member, _), link in list(self._links.items()):
                if member == rank:
                    with contextlib.suppress(OSError):
                        link.sendall(frame(encode(message)))

    def send_all(self, message: m.Message) -> None:
        for rank in {rank for rank, _ in list(self._links)}:
            self.send(rank, message)

    def await_message(
        self, kind: type, rank: int | None = None, timeout_s: float = TIMEOUT_S, count: int = 1, **fields: Any
    ):
        """The first messages of this kind, rank and these field values; fails after timeout_s."""

        def matching() -> list[Any]:
            return [
                message
                for _, sender, message in self.messages
                if isinstance(message, kind)
                and rank in (None, sender)
                and all(getattr(message, key) == value for key, value in fields.items())
            ]

        with self._changed:
            found = self._changed.wait_for(lambda: len(matching()) >= count, timeout_s)
        assert found, f"no {kind.__name__} {fields} of rank {rank} in {timeout_s} s\n{self.logs()}"
        return matching()[0] if count == 1 else matching()

    def await_beat(self, rank: int, right: Callable[[m.WorkerBeat], object], what: str) -> m.WorkerBeat:
        """The first heartbeat of `rank`, from now on, that is `right`."""
        with self._changed:
            start = len(self.heartbeats)

            def matching() -> list[m.WorkerBeat]:
                return [beat for beat in self.heartbeats[start:] if beat.rank == rank and right(beat)]

            found = self._changed.wait_for(matching, TIMEOUT_S)
        assert found, f"{what}: not said by rank {rank}, last {self.heartbeats[-3:]}\n{self.logs()}"
        return matching()[0]

    def at(self, kind: type, **fields: Any) -> list[float]:
        """Times at which messages of this kind came."""
        return [
            when
            for when, _, message in self.messages
            if isinstance(message, kind) and all(getattr(message, key) == value for key, value in fields.items())
        ]

    def _beat(self) -> None:
        while not self._is_closed:
            if self.beats:
                self.send_all(m.AgentBeat())
            time.sleep(0.2)

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        rank = -1
        reader = FrameReader()
        with contextlib.suppress(OSError):
            accept_authenticated(link, self.secret)
            while data := link.recv(1 << 16):
                for payload in reader.feed(data):
                    message = to_agent_from_worker.decode(payload)
                    with self._changed:
                        if isinstance(message, m.WorkerHello):
                            rank = message.rank
                            self._welcome(rank, message.incarnation, link)
                        if isinstance(message, m.WorkerBeat):
                            self.heartbeats.append(message)
                        else:
                            self.messages.append((time.monotonic(), rank, message))
                            self.watch(rank, message)
                        self._handle(rank, message)
                        self._changed.notify_all()

    def _welcome(self, rank: int, incarnation: int, link: socket.socket) -> None:
        self._links[rank, incarnation] = link
        say = [
            m.WorkerWelcome(
                generation=self.generation,
                world_size=self.world_size,
                address=self.address,
                heartbeat_interval_s=0.2,
                lease_s=self.lease_s,
            ),
            *(keys for members, keys in self._keys if rank in members and keys.generation == self.generation),
        ]
        link.sendall(b"".join(frame(encode(message)) for message in say))

    def _handle(self, rank: int, message: m.Message) -> None:
        if getattr(message, "generation", self.generation) != self.generation:
            return
        match message:
            case m.KeyPosted() if not message.group.startswith(self.withheld):
                keys = m.KeysPushed(
                    generation=message.generation,
                    group=message.group,
                    items={message.key: message.value},
                    members=message.members,
                )
                self._keys.append((message.members, keys))
                for member in message.members:
                    if member != rank or message.members == (rank, rank):
                        self.send(member, keys)
            case m.CounterAdded():
                key = (message.generation, message.group, message.key)
                self._counters[key] = self._counters.get(key, 0) + message.amount
                self.send(rank, m.CounterValue(rank, message.incarnation, message.request, self._counters[key]))
            case m.CommitAsked() if self.permit is not None:
                self.send(rank, self.permit(message))
            case events.WorkerReported():
                self._reports[rank, message.incarnation] = message.report
                if self._finished:
                    self.send_all(m.Complete(self.generation))
                elif len(self._reports) == self.world_size + len(self.successors):
                    self._publish()
            case events.WorkerRestored():
                self._restored.add(rank)
                if len(self._restored) == self.world_size and self.auto_resume:
                    for moved in self.plans[-1].successors if self.plans else ():
                        self.retired[moved].kill()
                        self.retired[moved].join(10)
                    self.resumed = self.generation
                    self.send_all(m.Resume(self.generation))
            case events.WorkerFinished():
                self._finished.add(rank)

    def _publish(self) -> None:
        former = {r: report for (r, n), report in self._reports.items() if n != self.successors.get(r, n)}
        reports = {r: report for (r, n), report in self._reports.items() if n == self.successors.get(r, n)}
        plan = self.decide(self.generation, reports, former) if former else self.decide(self.generation, reports)
        if isinstance(plan, Impossible):
            self.refusals.append(plan)
            return
        plan = msgspec.structs.replace(plan, successors=self.successors)
        self.successors = {}
        self.plans.append(plan)
        self.send_all(m.PlanPublished(plan))


def _child(program: Callable[..., None], env: dict[str, str], log: str, config: dict[str, Any]) -> None:
    """Runs in the forked worker: what a fresh interpreter would do for a script, as far as tests look at it."""
    import atexit
    import sys

    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(env)
    try:
        program(**config)
    except Exception:
        sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(1)
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)


def die(number: int = signal.SIGKILL) -> None:
    """End this process without a word."""
    os.kill(os.getpid(), number)
    signal.pause()
