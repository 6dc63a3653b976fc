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
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from flashrec.core import commit, events
from flashrec.core.types import Plan, Report
from flashrec.transport.handshake import accept_authenticated, new_secret, write_secret
from flashrec.wire import messages as m
from flashrec.wire.frames import FrameReader, encode, frame, to_agent_from_worker

TIMEOUT_S = 60.0
_context = multiprocessing.get_context("forkserver")


def _start_fork_server() -> None:
    """Python 3.11's fork server does not take over sys.path, so what it shall load must be found without it."""
    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    _context.set_forkserver_preload(["tests.runtime.programs"])
    forkserver.ensure_running()
    os.environ.pop("PYTHONPATH")
    if kept is not None:
        os.environ["PYTHONPATH"] = kept


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
        self.auto_resume = True
        self.permit: Callable[[m.CommitAsked], m.CommitAnswered] | None = None  # None: no answer
        self.withheld = "-"  # groups whose name begins so are not relayed
        self._reports: dict[int, Report] = {}
        self._restored: set[int] = set()
        self._finished: set[int] = set()
        self._keys: list[tuple[tuple[int, ...], m.KeysPushed]] = []
        self._counters: dict[tuple[int, str, str], int] = {}
        self._links: dict[int, socket.socket] = {}
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
        with self._changed:
            for rank in ranks:
                self._links.pop(rank, None)
            self.fence()
        for rank in ranks:
            self.start(program, rank, joins=True, **config)

    def await_exit(self, rank: int, timeout_s: float = TIMEOUT_S) -> int:
        self.processes[rank].join(timeout_s)
        code = self.processes[rank].exitcode
        assert code is not None, f"rank {rank} is still running after {timeout_s} s\n{self.logs()}"
        return code

    def await_end(self) -> None:
        for rank in range(self.world_size):
            code = self.await_exit(rank)
            assert code == 0, f"rank {rank} ended with {code}\n{self.logs()}"

    def results(self) -> dict[int, dict[str, Any]]:
        return {rank: json.loads((self.path / f"rank{rank}.json").read_text()) for rank in range(self.world_size)}

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.path.glob("*.log")))

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
        self._listener.close()

    # ---- control plane

    def fence(self, reason: str = "test") -> None:
        with self._changed:
            self.generation += 1
            self._reports, self._restored = {}, set()
            self.send_all(m.Fence(self.generation, reason))

    def send(self, rank: int, message: m.Message) -> None:
        with self._changed, contextlib.suppress(OSError):
            if rank in self._links:
                self._links[rank].sendall(frame(encode(message)))

    def send_all(self, message: m.Message) -> None:
        for rank in list(self._links):
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
                            self._welcome(rank, link)
                        if isinstance(message, m.WorkerBeat):
                            self.heartbeats.append(message)
                        else:
                            self.messages.append((time.monotonic(), rank, message))
                        self._handle(rank, message)
                        self._changed.notify_all()

    def _welcome(self, rank: int, link: socket.socket) -> None:
        self._links[rank] = link
        self.send(
            rank,
            m.WorkerWelcome(
                generation=self.generation,
                world_size=self.world_size,
                address=self.address,
                heartbeat_interval_s=0.2,
                lease_s=self.lease_s,
            ),
        )
        for members, keys in self._keys:
            if rank in members and keys.generation == self.generation:
                self.send(rank, keys)

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
                    if member != rank:
                        self.send(member, keys)
            case m.CounterAdded():
                key = (message.generation, message.group, message.key)
                self._counters[key] = self._counters.get(key, 0) + message.amount
                self.send(rank, m.CounterValue(rank, message.incarnation, message.request, self._counters[key]))
            case m.CommitAsked() if self.permit is not None:
                self.send(rank, self.permit(message))
            case events.WorkerReported():
                self._reports[rank] = message.report
                if self._finished:
                    self.send_all(m.Complete(self.generation))
                elif len(self._reports) == self.world_size:
                    plan = self.decide(self.generation, self._reports)
                    assert isinstance(plan, Plan), plan
                    self.plans.append(plan)
                    self.send_all(m.PlanPublished(plan))
            case events.WorkerRestored():
                self._restored.add(rank)
                if len(self._restored) == self.world_size and self.auto_resume:
                    self.send_all(m.Resume(self.generation))
            case events.WorkerFinished():
                self._finished.add(rank)


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
