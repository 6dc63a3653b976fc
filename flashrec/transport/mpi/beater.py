"""The agent's MPI child: meets the hub when told to, then sends a heartbeat every `interval_s`.

It meets each hub at most once: a second session between the same two processes may reuse a connection that is wedged.
Who wants to meet the same hub again starts a fresh beater.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from flashrec.transport.mpi.library import UnusableMPI, check_port, load
from flashrec.transport.mpi.parent import Parent
from flashrec.transport.mpi.words import (
    BEAT,
    BEAT_TAG,
    CONNECT_TIMEOUT_S,
    Beats,
    Ended,
    Going,
    Loaded,
    Means,
    Meet,
    Unusable,
)  # fmt: skip

KNOCK_TIMEOUT_S = 1.0


def main(parent: Parent) -> None:
    """Until the parent ends, or says so by closing our stdin."""
    settings = parent.begin().settings
    try:
        mpi, means = load(settings)
        check_port(mpi.Open_port(), means)
    except UnusableMPI as err:
        parent.say(Unusable(str(err)))
        return
    parent.say(Loaded(means))
    Beater(parent, mpi, means, settings.interval_s).run()


class Beater:
    """mpi: mpi4py's module."""

    def __init__(self, parent: Parent, mpi: Any, means: Means, interval_s: float) -> None:
        self._parent, self._mpi, self._means, self._interval_s = parent, mpi, means, interval_s
        self._patience = mpi.Info.Create()
        self._patience.Set("timeout", str(CONNECT_TIMEOUT_S))
        self._comm: Any = None
        self._meet: Meet | None = None
        self._sequence = 0
        self._sending: list[tuple[Any, bytes]] = []  # MPI reads from the buffer until the request is done

    def run(self) -> None:
        """For ever."""
        due_at = time.monotonic()
        while True:
            for word in self._parent.hear(max(0.0, due_at - time.monotonic())):
                if isinstance(word, Meet):
                    self._connect(word)
            now = time.monotonic()
            if now >= due_at:
                due_at = max(due_at + self._interval_s, now)
                self._parent.say(self._beat())

    def _connect(self, asked: Meet) -> None:
        self._comm, self._meet, self._sequence, self._sending = None, None, 0, []
        try:
            self._knock(*asked.knock)
            self._parent.say(Going(asked.session))
            comm = self._mpi.COMM_SELF.Connect(asked.port, self._patience)
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        except (OSError, self._mpi.Exception) as err:
            self._parent.say(Ended(asked.session, _reason(err)))
            return
        self._comm, self._meet = comm, asked

    def _knock(self, address: str, port: int) -> None:
        if not port or not self._means.address:
            return
        try:
            socket.create_connection((address, port), KNOCK_TIMEOUT_S, source_address=(self._means.address, 0)).close()
        except OSError as err:
            mine = f"{self._means.interface} ({self._means.address})"
            raise OSError(f"no way over {mine} to the manager's {address}, port {port}: {err}") from err

    def _beat(self) -> Beats:
        if self._comm is None or self._meet is None:
            return Beats()
        self._sequence += 1
        message = BEAT.pack(self._meet.session, self._meet.incarnation, self._sequence)
        try:
            self._sending.append((self._comm.Isend([message, self._mpi.BYTE], 0, BEAT_TAG), message))
            self._sending = [(request, data) for request, data in self._sending if not request.Test()]
        except self._mpi.Exception as err:
            self._parent.say(Ended(self._meet.session, f"send: {_reason(err)}"))
            self._comm = self._meet = None
            return Beats()
        return Beats(((self._meet.session, self._sequence),))


def _reason(err: BaseException) -> str:
    return str(err).splitlines()[0] if str(err) else type(err).__name__
