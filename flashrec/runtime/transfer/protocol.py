"""State from its sources to a target, over authenticated TCP connections, straight into existing memory.

    target                                    source, on each of its connections
    listens; its address is a key of group "restore/<target>"
                         ◄── (handshake) ───  connects
                         ◄── Hello ─────────  who, how many connections; on the first one with the manifest
    allocates what is missing
                         ─── Ready ─────────►  on the first connection; the source opens the others
    for one piece after the other
                         ─── Want ──────────►
                         ◄── bytes, digest ─
    compares; and for some pieces that another source has sent
                         ─── Want(check) ───►
                         ◄── digest ────────
    when all pieces are there
                         ─── Done ──────────►

The target asks, so that a source or connection that is slower simply sends less. Two requests are on their way on each
connection, so that it never idles. What one request asks for is a piece, see `pieces`; both ends cut the state alike.

Any error ends the transfer: all its connections are shut. A fence shuts them from the control thread.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from flashrec.runtime.state import Manifest
from flashrec.wire.frames import ProtocolError, frame

MAX_MANIFEST_BYTES = 1 << 30
_LENGTH = struct.Struct("!I")


class Address(msgspec.Struct, frozen=True):
    """Where a target listens."""

    host: str
    port: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a connection. source: rank. streams: connections that this source opens, with this one.
    manifest: on the first of them only."""

    source: int
    streams: int
    manifest: Manifest | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The target has room for this state."""


class Want(msgspec.Struct, frozen=True, tag=True):
    """Send this piece and its digest; check: its digest only."""

    piece: int
    check: bool = False


class Done(msgspec.Struct, frozen=True, tag=True):
    """The last frame of a connection. error: why the target does not take this state, '' when all is there. digest:
    over all pieces."""

    error: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Moved:
    """What one transfer has moved; on a source, what it has sent itself."""

    num_bytes: int
    digest: str  # over the digests of all pieces, hexadecimal
    manifest: Manifest


class Sockets:
    """Connections between ranks, to be shut by a fence from another thread."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()

    @contextlib.contextmanager
    def watch(self, sock: socket.socket) -> Iterator[socket.socket]:
        self.hold(sock)
        try:
            with sock:
                yield sock
        finally:
            self.release(sock)

    def hold(self, sock: socket.socket) -> None:
        self._open.add(sock)

    def release(self, sock: socket.socket) -> None:
        self._open.discard(sock)

    def shut(self) -> None:
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


Report = Callable[[int], None]  # is told how many bytes have moved so far


def unheard(num_bytes: int) -> None:
    """A report that nobody listens to."""


def tune(connection: socket.socket, timeout_s: float) -> None:
    """timeout_s: longest silence. Buffers are left to the kernel, which lets them grow further than we may."""
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_all(connection: socket.socket, views: list[memoryview]) -> None:
    views = [view for view in views if len(view)]
    while views:
        views = advance(views, connection.sendmsg(views))


def receive_all(connection: socket.socket, views: list[memoryview]) -> None:
    views = [view for view in views if len(view)]
    while views:
        received = connection.recvmsg_into(views)[0]
        if not received:
            raise ConnectionError("the other end closed the connection")
        views = advance(views, received)


def advance(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `views` when `done` bytes of them are through."""
    for i, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[i + 1 :]]
        done -= len(view)
    return []


def send_message(connection: socket.socket, message: msgspec.Struct) -> None:
    connection.sendall(frame(msgspec.msgpack.encode(message), MAX_MANIFEST_BYTES))


def receive_message(connection: socket.socket, kind: Any) -> Any:
    """One frame; kind may be a union of tagged structs. Raises OSError, ProtocolError."""
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
        raise ProtocolError(f"not what is expected here ({kind}): {err}") from err
