"""State from a source to a target, over one authenticated TCP connection, straight into existing memory.

    target                                    source
    listens; its address is a key of group "restore/<target>"
                         ◄── (handshake) ───  connects
                         ◄── manifest ──────  frame
    allocates what is missing
                         ─── ready ────────►  frame
                         ◄── tensors ───────  their bytes, in the order of the manifest
                         ◄── digests ───────  frame: one SHA-256 per tensor
    compares
                         ─── verified ─────►  frame

SHA-256 because common CPUs have instructions for it (2 GB/s a core here; BLAKE2b 1.3); it runs beside the copying.
A fence shuts the connection from the control thread.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from flashrec.runtime.state import Manifest
from flashrec.wire.frames import ProtocolError, frame

MAX_MANIFEST_BYTES = 1 << 30
_LENGTH = struct.Struct("!I")
_SOCKET_BUFFER_BYTES = 4 << 20
T = TypeVar("T", bound=msgspec.Struct)


class Address(msgspec.Struct, frozen=True):
    """Where a target listens."""

    host: str
    port: int


class Digests(msgspec.Struct, frozen=True):
    digests: tuple[bytes, ...]


class Verdict(msgspec.Struct, frozen=True):
    """The target to the source, twice: ready for the tensors; then all digests are equal. error: '' means yes."""

    error: str


@dataclass(frozen=True)
class Moved:
    """What one transfer has moved."""

    num_bytes: int
    digest: str  # over all tensor digests, hexadecimal
    manifest: Manifest


class Sockets:
    """Connections of running transfers, to be shut by a fence from another thread."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()

    @contextlib.contextmanager
    def watch(self, sock: socket.socket) -> Iterator[socket.socket]:
        self._open.add(sock)
        try:
            with sock:
                yield sock
        finally:
            self._open.discard(sock)

    def shut(self) -> None:
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


Report = Callable[[int], None]  # is told how many bytes have moved so far


def unheard(num_bytes: int) -> None:
    """A report that nobody listens to."""


def tune(connection: socket.socket, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def send_all(connection: socket.socket, views: list[memoryview]) -> None:
    views = [view for view in views if len(view)]
    while views:
        views = _advance(views, connection.sendmsg(views))


def receive_all(connection: socket.socket, views: list[memoryview]) -> None:
    views = [view for view in views if len(view)]
    while views:
        received = connection.recvmsg_into(views)[0]
        if not received:
            raise ConnectionError("the source closed the connection")
        views = _advance(views, received)


def _advance(views: list[memoryview], done: int) -> list[memoryview]:
    for i, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[i + 1 :]]
        done -= len(view)
    return []


def send_message(connection: socket.socket, message: msgspec.Struct) -> None:
    connection.sendall(frame(msgspec.msgpack.encode(message), MAX_MANIFEST_BYTES))


def receive_message(connection: socket.socket, kind: type[T]) -> T:
    head = bytearray(_LENGTH.size)
    receive_all(connection, [memoryview(head)])
    (size,) = _LENGTH.unpack(head)
    if size > MAX_MANIFEST_BYTES:
        raise ProtocolError(f"frame of {size} bytes is over the limit of {MAX_MANIFEST_BYTES}")
    payload = bytearray(size)
    receive_all(connection, [memoryview(payload)])
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as err:
        raise ProtocolError(f"not a {kind.__name__}: {err}") from err
