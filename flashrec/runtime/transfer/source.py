"""The source's end of a restore, see `protocol`."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from flashrec.runtime.transfer.crew import Crew, Tally, unchecked
from flashrec.runtime.transfer.digests import Digest, portions
from flashrec.runtime.transfer.holding import Holding
from flashrec.runtime.transfer.memory import Memory
from flashrec.runtime.transfer.pieces import Piece, cut
from flashrec.runtime.transfer.protocol import (
    Address,
    Done,
    Hello,
    Moved,
    Ready,
    Report,
    Sockets,
    Want,
    receive_message,
    send_all,
    send_message,
    tune,
    unheard,
)
from flashrec.transport.handshake import connect_authenticated
from flashrec.wire.frames import ProtocolError

MAX_STREAMS = 4  # connections of one source
MAX_CONNECTIONS = 8  # of one target


def send(
    address: Address,
    sockets: Sockets,
    secret: bytes,
    holding: Holding,
    timeout_s: float,
    report: Report = unheard,
    *,
    source: int = 0,
    num_sources: int = 1,
    patience_s: float | None = None,
    check: Callable[[], None] = unchecked,
) -> Moved:
    """Send what is held, or a part of it, to the target at `address`.

    source: rank of this one, of `num_sources` that send to the target. timeout_s: longest silence; patience_s: the same
    while the target waits for other sources. Raises OSError, also when a fence cut it, and what `check` raises.
    """
    specs = holding.manifest.specs()
    pieces, memory, tally = cut(specs), Memory(holding.tensors, specs), Tally(report)
    memory.settle()
    streams = num_streams(len(pieces), num_sources)
    patience_s = timeout_s if patience_s is None else patience_s
    digests: list[str] = []

    def serve(hello: Hello) -> None:
        connection = crew.add(socket.socket(_family(address)))
        tune(connection, timeout_s)
        connection.connect((address.host, address.port))
        connect_authenticated(connection, secret)
        send_message(connection, hello)
        if hello.manifest is not None:
            _await_ready(connection, patience_s)
            for _ in range(1, streams):
                crew.start(lambda: serve(Hello(source, streams)))
        digests.append(_serve(connection, pieces, memory, tally, timeout_s, patience_s))

    with Crew(sockets, check) as crew:
        serve(Hello(source, streams, holding.manifest))
        crew.join()
    return Moved(tally.num_bytes, digests[0], holding.manifest)


def num_streams(num_pieces: int, num_sources: int) -> int:
    """Connections of each source: more than one to fill a path, no more than there are cores and pieces for."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_STREAMS, MAX_CONNECTIONS // num_sources, cores, num_pieces // 2))


def _await_ready(connection: socket.socket, patience_s: float) -> None:
    connection.settimeout(patience_s)
    _check(receive_message(connection, Ready | Done))


def _serve(
    connection: socket.socket,
    pieces: Sequence[Piece],
    memory: Memory,
    tally: Tally,
    timeout_s: float,
    patience_s: float,
) -> str:
    """Send what is asked for until all is there. Returns the digest over everything."""
    stage = memory.stage()
    while True:
        connection.settimeout(patience_s)
        request = receive_message(connection, Want | Done)
        connection.settimeout(timeout_s)
        if isinstance(request, Done):
            _check(request)
            return request.digest
        if not 0 <= request.piece < len(pieces):
            raise ProtocolError(f"the target asks for piece {request.piece} of {len(pieces)}")
        views = stage.gather(pieces[request.piece])
        if request.check:
            send_all(connection, [memoryview(_digest(views))])
        else:
            send_piece(connection, views)
            tally.add(pieces[request.piece].num_bytes)


def send_piece(connection: socket.socket, views: list[memoryview]) -> None:
    """The bytes, then their digest."""
    digest = Digest()
    for portion in portions(views):
        digest.update(portion)
        send_all(connection, portion)
    send_all(connection, [memoryview(digest.value())])


def _digest(views: list[memoryview]) -> bytes:
    digest = Digest()
    digest.update(views)
    return digest.value()


def _check(answer: Ready | Done) -> None:
    if isinstance(answer, Done) and answer.error:
        # The target ends with this error and is replaced; the source is sound and waits for the fence.
        raise ConnectionError(f"the target refuses the state: {answer.error}")


def _family(address: Address) -> socket.AddressFamily:
    return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
