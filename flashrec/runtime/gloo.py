"""gloo: building a connected backend, and ending its collectives.

`abort()` does nothing for gloo, so a rank that is not a neighbour of the dead one waits for its full time-out. What
does work: shut the receiving side of its TCP connections down from another thread; gloo's loop sees the end of the
stream and fails every pending operation within milliseconds.

Only the receiving side, and the connections are kept open by us until all ranks have left the old generation: gloo
loses an operation whose write fails inside its loop (a "ready to receive" was waiting in the queue when we or the
peer closed), and then waits for it for ever. With this no write fails between living ranks. Measured with 3 ranks in a
tight loop: shutting both sides hung in about every 30th fence.

The connections are found by the addresses that passed through our store. A blob of gloo is `u64 n, hostname (n bytes),
u64 m, sockaddr (m bytes), …`. Descriptors are dup()ed before they are looked at, so a number that is reused meanwhile
cannot hit a foreign socket. What a killed peer's reset can still make gloo lose is dealt with in `stuck`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator

Address = tuple[str, int]
Ends = tuple[Address, Address]  # here, there

_U64 = struct.Struct("=Q")
_MAX_HOSTNAME_BYTES = 4096


def parse_address(blob: bytes) -> Address | None:
    """(ip, port) that a rank listens on, from its rendezvous blob; None when this is not one."""
    if len(blob) < _U64.size:
        return None
    (hostname_bytes,) = _U64.unpack_from(blob)
    start = 2 * _U64.size + hostname_bytes
    if hostname_bytes > _MAX_HOSTNAME_BYTES or len(blob) < start + 8:
        return None
    family, port = struct.unpack_from("=H", blob, start)[0], struct.unpack_from("!H", blob, start + 2)[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, blob[start + 4 : start + 8]), port
    if family == socket.AF_INET6 and len(blob) >= start + 24:
        return socket.inet_ntop(socket.AF_INET6, blob[start + 8 : start + 24]), port
    return None


def addresses(values: Iterable[bytes]) -> set[Address]:
    """All gloo addresses among store values."""
    return {address for address in map(parse_address, values) if address is not None}


def connections(listening: set[Address]) -> set[Ends]:
    """The connections of this process that end at one of these addresses, on either side."""
    return {ends for _, ends in _connections(listening)}


def shut(listening: set[Address]) -> list[socket.socket]:
    """End every collective over connections at these addresses. Returns what must be kept open, see above."""
    kept = []
    for connection, _ in _connections(listening):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RD)
        kept.append(connection.dup())
    return kept


def _connections(listening: set[Address]) -> Iterator[tuple[socket.socket, Ends]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with connection:
            ends = _ends(connection)
            if ends is not None and not listening.isdisjoint(ends):
                yield connection, ends


def _ends(connection: socket.socket) -> Ends | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    try:
        here, there = connection.getsockname()[:2], connection.getpeername()[:2]
    except OSError:  # a listening socket has no peer
        return None
    return (here[0].split("%")[0], here[1]), (there[0].split("%")[0], there[1])
