"""The end of the rank whose state is mirrored: a thread that finishes the copy of each step and sends it to the holder.

    open(v) ─► small things copied ─► [thread: the rest copied ─► sent ─► acknowledged] ─► before the vote of step v

The main thread waits for the thread before it votes, and before anything is updated. A connection lives as long as a
generation. What is cut by a fence is dropped without a word. What ends otherwise is tried again, a few times, on a new
connection; then the error names the address of the holder, so that the manager can look who is at fault.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from flashrec.runtime import codec
from flashrec.runtime.errors import Superseded
from flashrec.runtime.mirrors.copying import Copying
from flashrec.runtime.mirrors.messages import Acknowledged, Sealed, Ship
from flashrec.runtime.mirrors.slots import digest_of
from flashrec.runtime.timeline import logger
from flashrec.runtime.transfer import Address, Sockets
from flashrec.runtime.transfer.protocol import receive_message, send_all, send_message, tune
from flashrec.transport.handshake import connect_authenticated
from flashrec.wire.frames import ProtocolError

MAX_TRIES = 3
_RETRY_INTERVAL_S = 0.2
_CONNECT_TIMEOUT_S = 5.0


@dataclass
class Job:
    """One state: copied into the slot of `copying`, and shipped if `find` says where the holder is."""

    copying: Copying
    generation: int
    find: Callable[[], Address] | None
    copied: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Shipper:
    """One for each process. is_superseded(generation): a fence explains whatever goes wrong."""

    def __init__(self, rank: int, secret: bytes, timeout_s: float, is_superseded: Callable[[int], bool]) -> None:
        self._rank, self._secret, self._timeout_s, self._is_superseded = rank, secret, timeout_s, is_superseded
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._sockets = Sockets()
        self._connection: socket.socket | None = None
        self._watch = contextlib.ExitStack()
        self._address: Address | None = None
        self._generation = -1
        threading.Thread(target=self._run, name="flashrec-mirror-shipper", daemon=True).start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def cut(self) -> None:
        """A fence: whatever is under way ends now."""
        self._sockets.shut()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                self._do(job)
            except BaseException as err:  # the main thread raises it
                job.error = err
                self._drop()
            finally:
                job.copied.set()
                job.ended.set()
            del job

    def _do(self, job: Job) -> None:
        job.copying.finish()
        slot, v = job.copying.slot, job.copying.v
        manifest = msgspec.msgpack.encode(job.copying.manifest)
        digest = digest_of(manifest, slot.buffer)
        slot.complete(v, manifest, digest)
        job.copied.set()
        if job.find is None:
            return
        ship = Ship(self._rank, job.generation, v, slot.buffer.numel(), manifest)
        bytes_of_it = codec.tensor_bytes(slot.buffer)
        for attempt in range(1, MAX_TRIES + 1):
            try:
                self._ship(job, ship, bytes_of_it, digest)
                return
            except (OSError, ProtocolError) as err:
                self._drop()
                if self._is_superseded(job.generation):
                    raise Superseded(f"generation {job.generation} is superseded") from err
                to = f" [{self._address.host}]:{self._address.port}" if self._address else ""
                text = f"the state of step {v} did not reach the holder of its mirror, closed by peer{to}: {err}"
                logger.warning("mirrors: try %d of %d: %s", attempt, MAX_TRIES, text)
                if attempt == MAX_TRIES:
                    raise ConnectionError(text) from err
                time.sleep(_RETRY_INTERVAL_S)

    def _ship(self, job: Job, ship: Ship, bytes_of_it: memoryview, digest: bytes) -> None:
        """Raises OSError, ProtocolError when it has to be tried again."""
        if self._generation != job.generation:
            self._drop()
        if self._connection is None:
            assert job.find is not None
            self._address, self._generation = job.find(), job.generation
            connection = socket.create_connection(
                (self._address.host, self._address.port), timeout=min(self._timeout_s, _CONNECT_TIMEOUT_S)
            )
            self._connection = self._watch.enter_context(self._sockets.watch(connection))
            self._check_current(job)  # a fence that came before has not cut it
            tune(connection, self._timeout_s)
            connect_authenticated(connection, self._secret)
        self._check_current(job)
        send_message(self._connection, ship)
        send_all(self._connection, [bytes_of_it])
        send_message(self._connection, Sealed(digest))
        said = receive_message(self._connection, Acknowledged)
        if said.error:
            raise ConnectionError(f"refused: {said.error}")
        if said.v != ship.v:
            raise ProtocolError(f"an answer for step {said.v}, not {ship.v}")

    def _check_current(self, job: Job) -> None:
        if self._is_superseded(job.generation):
            raise Superseded(f"generation {job.generation} is superseded")

    def _drop(self) -> None:
        """End the connection, if there is one."""
        self._watch.close()
        self._connection = None
