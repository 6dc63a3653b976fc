"""The connections of one transfer, and a thread for each. The first error ends all of them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from flashrec.runtime.transfer.protocol import Report, Sockets


def unchecked() -> None:
    """A check that nothing has to pass."""


class Crew:
    """Use as a context: at its end no thread runs any more and all connections are closed. What it raises is the first
    error of any thread, this one's included."""

    def __init__(self, sockets: Sockets, check: Callable[[], None] = unchecked) -> None:
        """check: raises when the transfer is no longer wanted. Asked once a connection can be shut by a fence, so that
        no fence is missed."""
        self._sockets, self._check = sockets, check
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._shut: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._wake: Callable[[], None] = unchecked
        self._error: BaseException | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.end(error)
        for thread in self._threads:
            thread.join()
        self._stack.close()
        if self._error is not None and self._error is not error:
            raise self._error

    def add(self, connection: socket.socket) -> socket.socket:
        """Is closed with the crew, and shut when it ends early. Raises ConnectionAborted, and what `check` raises."""
        self._stack.enter_context(self._sockets.watch(connection))
        self.cover(connection)
        self._check()
        return connection

    def cover(self, listener: socket.socket) -> None:
        """Shut it when the crew ends early; closing it is the caller's."""
        with self._lock:
            self._shut.append(listener)
            if self._error is not None:
                raise ConnectionAbortedError("another connection of this transfer has failed")

    def on_end(self, wake: Callable[[], None]) -> None:
        """Called when the crew ends early, for threads that wait for something else than a connection."""
        self._wake = wake

    def start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(work,), name="flashrec-transfer", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait for all threads. Raises the first error of any."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException) -> None:
        """Shut everything."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            for connection in self._shut:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._wake()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.end(error)


class Tally:
    """Bytes that all threads together have moved."""

    def __init__(self, report: Report) -> None:
        self._report, self._lock = report, threading.Lock()
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self._report(self.num_bytes)
