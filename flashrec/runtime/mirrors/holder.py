"""The holder's end: it listens, and takes in the states of the ranks whose mirrors it holds.

A state counts when all of it has come with the right digest, in the generation that is in force. A fence freezes what
is held: nothing becomes complete, and nothing complete is overwritten, until the next generation begins. What the
report after the fence says therefore stays true until the plan is carried out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from flashrec.runtime import codec
from flashrec.runtime.mirrors.messages import Acknowledged, Sealed, Ship
from flashrec.runtime.mirrors.slots import Pair, Slot, digest_of
from flashrec.runtime.timeline import logger
from flashrec.runtime.transfer import Address, Sockets, listen
from flashrec.runtime.transfer.protocol import receive_all, receive_message, send_message, tune
from flashrec.transport.handshake import accept_authenticated
from flashrec.wire.frames import ProtocolError

_STRANGER_TIMEOUT_S = 2.0
_RETRY_INTERVAL_S = 0.2
MAX_BYTES = 1 << 42


class MirrorHolder:
    """Holds mirrors. One for each process; its threads end with the process."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret = secret
        self._listener = listen(address)
        self.address = Address(address, self._listener.getsockname()[1])
        self._sockets = Sockets()
        self._lock = threading.Lock()
        self._generation = -1  # in force; -1: frozen
        self._held: dict[int, Pair] = {}
        self._writing: dict[int, threading.Lock] = {}  # a slot has one writer, also while an older one is ending
        self._connections: dict[int, socket.socket] = {}
        threading.Thread(target=self._accept, name="flashrec-mirrors", daemon=True).start()

    @property
    def num_bytes(self) -> int:
        """Memory that mirrors occupy."""
        with self._lock:
            return sum(pair.num_bytes for pair in self._held.values())

    def accept(self, generation: int) -> None:
        """From now on states of this generation are taken in, and no others."""
        with self._lock:
            self._generation = generation

    def freeze(self) -> None:
        """Nothing of what is held changes until the next `accept`."""
        with self._lock:
            self._generation = -1
        self._sockets.shut()

    def versions(self) -> dict[int, tuple[int, ...]]:
        """Rank -> steps of its complete mirrors."""
        with self._lock:
            return {rank: found for rank, pair in sorted(self._held.items()) if (found := pair.versions())}

    def of(self, rank: int, v: int) -> Slot:
        """Raises KeyError when there is no such mirror."""
        with self._lock:
            return self._held[rank].of(v)

    def forget_after(self, v: int) -> None:
        with self._lock:
            for pair in self._held.values():
                pair.forget_after(v)

    def drop_others(self, ranks: set[int]) -> None:
        """Give back the memory of mirrors that are somebody else's now."""
        with self._lock:
            for rank in self._held.keys() - ranks:
                del self._held[rank]

    # ---- connections

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as err:  # no descriptor is left, say
                if self._listener.fileno() < 0:
                    return
                logger.warning("mirrors: cannot take a connection in: %s", err)
                time.sleep(_RETRY_INTERVAL_S)
                continue
            threading.Thread(
                target=self._serve, args=(connection, peer[0]), name="flashrec-mirror-holder", daemon=True
            ).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        with self._sockets.watch(connection):
            try:
                accept_authenticated(connection, self._secret, _STRANGER_TIMEOUT_S)
            except OSError as err:
                logger.warning("mirrors: refused a connection from %s: %s", peer, err)
                return
            try:
                tune(connection, 0.0)
                connection.settimeout(None)  # a step may take as long as it likes; a fence shuts the connection
                while True:
                    self._take(connection, receive_message(connection, Ship))
            except (OSError, ProtocolError) as err:
                logger.info("mirrors: the connection from %s has ended: %s", peer, err)

    def _take(self, connection: socket.socket, ship: Ship) -> None:
        if ship.size > MAX_BYTES:
            raise ProtocolError(f"a state of {ship.size} bytes")
        with self._lock:
            pair = self._held.setdefault(ship.rank, Pair())
            writing = self._writing.setdefault(ship.rank, threading.Lock())
            former = self._connections.get(ship.rank)
            self._connections[ship.rank] = connection
        if former is not None and former is not connection:
            _shut(former)
        with writing:
            with self._lock:
                if error := self._objection(ship):
                    slot = None
                else:
                    slot = pair.next()
                    slot.v = -1
            if slot is None:
                raise ProtocolError(error)
            slot.begin(ship.size)
            receive_all(connection, [codec.tensor_bytes(slot.buffer)])
            sealed = receive_message(connection, Sealed)
            is_right = digest_of(ship.manifest, slot.buffer) == sealed.digest
            with self._lock:
                error = self._objection(ship)
                if is_right and not error:
                    slot.complete(ship.v, ship.manifest, sealed.digest)
        if not is_right:
            error = "it has come with other bytes than it left"
            logger.error("mirrors: the state of rank %d at step %d is refused: %s", ship.rank, ship.v, error)
        send_message(connection, Acknowledged(ship.v, error))

    def _objection(self, ship: Ship) -> str:
        if ship.generation != self._generation:
            return f"generation {ship.generation} is not in force here ({self._generation} is)"
        return ""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
