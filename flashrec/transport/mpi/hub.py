"""The manager's MPI child: lets beaters in, one at a time, and hears them. It never sends, so no dead peer can hold it.

An Accept keeps everybody else unheard until the peer has come: so it is only made for a beater that is in Connect at
this instant (`Accept`), and it gives up after ACCEPT_TIMEOUT_S. Ports are used in turn: a Connect that comes late must
not meet a newer Accept. Between two looks at all sessions the process sleeps; MPI moves only inside its calls.
Communicators are never freed, so after MAX_LOST lost sessions the hub ends, and the next one begins anew.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import sys
import time
from typing import Any

from flashrec.transport.mpi.library import UnusableMPI, check_port, load
from flashrec.transport.mpi.parent import Parent
from flashrec.transport.mpi.words import (
    ACCEPT_TIMEOUT_S,
    BEAT,
    BEAT_TAG,
    TICK_INTERVAL_S,
    Accept,
    Accepted,
    Beats,
    Drop,
    Ended,
    Loaded,
    Means,
    Settings,
    Unusable,
)  # fmt: skip

NUM_PORTS = 256
MAX_LOST = 1000  # sessions; MPICH has 2048 context ids, and looks through all peers it ever had at each Accept
_BACKLOG = 1024


def main(parent: Parent) -> None:
    """Until the parent ends, or says so by closing our stdin."""
    settings = parent.begin().settings
    try:
        mpi, means = load(settings)
        ports = tuple(mpi.Open_port() for _ in range(NUM_PORTS))
        check_port(ports[0], means)
    except UnusableMPI as err:
        parent.say(Unusable(str(err)))
        return
    door = _door(means, settings)
    knock = door.getsockname()[1] if door is not None else 0
    parent.say(Loaded(Means(means.library, means.provider, means.interface, means.address, knock), ports))
    Hub(parent, mpi, door).run()
    print(f"{MAX_LOST} lost sessions are enough for one hub", file=sys.stderr, flush=True)
    parent.end()


def _door(means: Means, settings: Settings) -> socket.socket | None:
    """Where beaters knock before they connect: who cannot reach it would only keep the hub waiting."""
    if not means.address:
        return None
    low, high = settings.ports
    for port in range(low, high + 1):
        door = socket.socket()
        try:
            door.bind((means.address, port))
            door.listen(_BACKLOG)
        except OSError:
            door.close()
            continue
        door.setblocking(False)
        return door
    raise OSError(f"no TCP port from {low} to {high} is free on {means.address}")


class _Session:
    def __init__(self, incarnation: int, comm: Any) -> None:
        self.incarnation, self.comm, self.buffer = incarnation, comm, bytearray(BEAT.size)


class Hub:
    """mpi: mpi4py's module."""

    def __init__(self, parent: Parent, mpi: Any, door: socket.socket | None) -> None:
        self._parent, self._mpi, self._doors = parent, mpi, [door] if door is not None else []
        self._sessions: dict[int, _Session] = {}
        self._waiting: collections.deque[Accept] = collections.deque()
        self._num_lost = 0
        self._patience = mpi.Info.Create()
        self._patience.Set("timeout", str(ACCEPT_TIMEOUT_S))

    def run(self) -> None:
        """Until MAX_LOST sessions were lost."""
        looked_at = time.monotonic()
        while self._num_lost < MAX_LOST:
            pause_s = 0.0 if self._waiting else max(0.0, looked_at + TICK_INTERVAL_S - time.monotonic())
            self._answer_knocks()
            for word in self._parent.hear(pause_s, self._doors):
                if isinstance(word, Accept):
                    self._waiting.append(word)
                elif isinstance(word, Drop):
                    self._drop(word.session)
            if self._waiting:
                self._accept(self._waiting.popleft())
            elif time.monotonic() - looked_at >= TICK_INTERVAL_S:
                looked_at = time.monotonic()
                self._parent.say(self._look())

    def _answer_knocks(self) -> None:
        for door in self._doors:
            with contextlib.suppress(OSError):  # nobody else is there, or has gone already
                while True:
                    door.accept()[0].close()

    def _accept(self, asked: Accept) -> None:
        began_at = time.monotonic()
        try:
            comm = self._mpi.COMM_SELF.Accept(asked.port, self._patience)
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        except self._mpi.Exception as err:
            self._parent.say(Ended(asked.session, f"Accept: {_first_line(err)}", time.monotonic() - began_at))
            return
        self._sessions[asked.session] = _Session(asked.incarnation, comm)
        self._parent.say(Accepted(asked.session, time.monotonic() - began_at))

    def _look(self) -> Beats:
        """Take everything that has come."""
        newest, broken = {}, {}
        for number, session in self._sessions.items():
            try:
                while session.comm.Iprobe(source=0, tag=BEAT_TAG):
                    session.comm.Recv([session.buffer, self._mpi.BYTE], source=0, tag=BEAT_TAG)
                    said, incarnation, sequence = BEAT.unpack(session.buffer)
                    if (said, incarnation) == (number, session.incarnation):
                        newest[number] = sequence
            except self._mpi.Exception as err:
                broken[number] = _first_line(err)
        for number, reason in broken.items():
            self._drop(number)
            self._parent.say(Ended(number, reason))
        return Beats(tuple(newest.items()))

    def _drop(self, number: int) -> None:
        self._waiting = collections.deque(asked for asked in self._waiting if asked.session != number)
        # no Comm.Free: it would wait for the rest of what a dead peer began to send
        self._num_lost += self._sessions.pop(number, None) is not None


def _first_line(err: BaseException) -> str:
    return str(err).splitlines()[0] if str(err) else type(err).__name__
