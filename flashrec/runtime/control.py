"""The connection to the agent of this node: a unix socket, a reading thread and a beating thread.

    worker                         agent
    (handshake of transport.handshake)
    WorkerHello            ───►
                           ◄───    WorkerWelcome (timing rules, our node's address)
    WorkerBeat …           ───►                      every heartbeat_interval_s, with the step tags
                           ◄───    AgentBeat …       renews our lease

The lease is the permission to run: when the agent is gone, or silent for `lease_s`, this process ends at once with
exit code 75, because its rank may already live elsewhere. Threads of Python stop with the process, so a worker that
is stopped or holds the GIL for ever does not beat, and its agent ends it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from flashrec.runtime import stacks
from flashrec.runtime.board import Board
from flashrec.runtime.environment import Environment
from flashrec.runtime.progress import Progress
from flashrec.transport.handshake import connect_authenticated, receive_exactly
from flashrec.transport.paths import stacks_path
from flashrec.transport.readable import await_readable
from flashrec.wire import messages as m
from flashrec.wire.frames import FrameReader, ProtocolError, encode, frame, to_worker

FENCED_EXIT_CODE = 75  # EX_TEMPFAIL: this process gave up its rank, nothing is wrong with the script
_WELCOME_TIMEOUT_S = 60.0
_READ_BYTES = 1 << 16


class Control:
    """Sends from any thread; what is received goes to the board, and a fence to `on_fence`."""

    def __init__(self, sock: socket.socket, reader: FrameReader, progress: Progress, welcome: m.WorkerWelcome) -> None:
        self._socket, self._reader, self._progress = sock, reader, progress
        self._send_lock = threading.Lock()
        self._pid = os.getpid()
        self._closing = False
        self._jitter = random.Random()  # not the script's generator: it may draw from that at any moment
        self.welcome = welcome

    @classmethod
    def connect(cls, env: Environment, secret: bytes, progress: Progress) -> Control:
        """Connect, prove the secret, say hello, take the welcome. Raises OSError, HandshakeRefused, ProtocolError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_WELCOME_TIMEOUT_S)
        try:
            sock.connect(str(env.socket))
        except OSError as err:
            raise ConnectionError(
                f"cannot reach the agent of this node at {env.socket}: {err}. FLASHREC_SOCKET is set by "
                "`flashrec run`; unset it to train without recovery"
            ) from err
        connect_authenticated(sock, secret)
        stacks.let_agent_look(sock)
        number = stacks.register(stacks_path(env.socket, env.rank, env.incarnation))
        sock.sendall(frame(encode(m.WorkerHello(env.rank, env.incarnation, os.getpid(), stacks_signal=number))))
        reader = FrameReader()
        control = cls(sock, reader, progress, _first(sock, reader))
        sock.settimeout(control.welcome.lease_s)
        return control

    def start(self, board: Board, on_fence: Callable[[int], None]) -> None:
        """Start both threads. `on_fence(generation)` runs in the reading thread and must not wait for the main one."""
        threading.Thread(target=self._read, args=(board, on_fence), name="flashrec-control", daemon=True).start()
        threading.Thread(target=self._beat, name="flashrec-beat", daemon=True).start()

    def send(self, message: m.ToAgentFromWorker) -> None:
        """Send one message. An agent that does not take it within the lease is as good as gone: ends the process."""
        data = frame(encode(message))
        with self._send_lock:
            try:
                self._socket.sendall(data)
            except OSError as err:
                if not self._closing:
                    self._end(f"cannot send to the agent of this node: {err}")

    def say_farewell(self) -> None:
        """The process ends in an orderly way: from now on a closed connection is no reason to fence ourselves."""
        if not self._closing:
            self._closing = True
            self.send(m.WorkerFarewell(rank=self._progress.rank, incarnation=self._progress.incarnation))

    def leave(self, reason: str) -> NoReturn:
        """End this process now, in good order."""
        self.say_farewell()
        self._end(reason, exit_code=0)

    def give_up(self, reason: str) -> NoReturn:
        """End this process now: its rank is to be replaced."""
        self._end(reason)

    def is_forked(self) -> bool:
        """True in a child (a data loader's worker) that inherited this object."""
        return os.getpid() != self._pid

    def beat(self) -> None:
        """Say now where this rank is."""
        if not self._closing:
            self.send(self._progress.beat())

    def _beat(self) -> None:
        while not self._closing:
            self.beat()
            # not in time with the steps: how often a rank is seen waiting shall be how much it waits
            time.sleep(self.welcome.heartbeat_interval_s * self._jitter.uniform(0.8, 1.0))

    def _read(self, board: Board, on_fence: Callable[[int], None]) -> None:
        pending = self._reader.feed(b"")
        while True:
            for payload in pending:
                self._receive(payload, board, on_fence)
            try:
                readable = await_readable([self._socket], self.welcome.lease_s)
                data = self._socket.recv(_READ_BYTES) if readable else None
            except OSError as err:
                data = b""
                reason = f"the connection to the agent of this node broke: {err}"
            else:
                reason = "the agent of this node is gone"
            if self._closing and not data:
                return
            if data is None:
                self._end(f"no sign of life from the agent of this node for {self.welcome.lease_s:g} s")
            if not data:
                self._end(reason)
            try:
                pending = self._reader.feed(data)
            except ProtocolError as err:
                self._end(f"the agent of this node does not speak our protocol: {err}")

    def _receive(self, payload: bytes, board: Board, on_fence: Callable[[int], None]) -> None:
        try:
            message = to_worker.decode(payload)
        except ProtocolError as err:
            self._end(f"the agent of this node does not speak our protocol: {err}")
        if isinstance(message, m.Stop):
            self._end(f"stopped: {message.reason}", exit_code=0)
        if board.deliver(message):
            on_fence(board.announced)

    def _end(self, reason: str, exit_code: int = FENCED_EXIT_CODE) -> NoReturn:
        with contextlib.suppress(OSError):
            os.write(2, f"flashrec: rank {self._progress.rank} ends: {reason}\n".encode())
        os._exit(exit_code)


def _first(sock: socket.socket, reader: FrameReader) -> m.WorkerWelcome:
    """The welcome. What follows it in the same bytes must stay in the reader, so read frame by frame."""
    refused = "the agent of this node refused this worker (closed the connection)"
    head = receive_exactly(sock, 4, refused)
    reader.feed(head)  # checks the limit before anything of that size is read
    for payload in reader.feed(receive_exactly(sock, int.from_bytes(head, "big"), refused)):
        message = to_worker.decode(payload)
        if isinstance(message, m.Stop):
            raise ConnectionError(f"the agent of this node refuses this worker: {message.reason}")
        if isinstance(message, m.WorkerWelcome):
            return message
    raise ProtocolError("the first message of the agent is not a WorkerWelcome")
