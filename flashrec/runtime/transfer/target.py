"""The target's end of a restore, see `protocol`; and a restore from memory that this rank holds itself."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence

import torch

from flashrec.runtime.errors import LayoutMismatch, RecoveryFailed
from flashrec.runtime.state import Manifest, State
from flashrec.runtime.timeline import logger
from flashrec.runtime.transfer.crew import Crew, Tally, unchecked
from flashrec.runtime.transfer.digests import DIGEST_BYTES, Digest, combined, portions
from flashrec.runtime.transfer.holding import Holding
from flashrec.runtime.transfer.memory import Memory
from flashrec.runtime.transfer.pieces import cut
from flashrec.runtime.transfer.protocol import (
    Done,
    Hello,
    Moved,
    Ready,
    Report,
    Sockets,
    Want,
    receive_all,
    receive_message,
    send_message,
    tune,
    unheard,
)
from flashrec.runtime.transfer.requests import Request, Requests
from flashrec.transport.handshake import HandshakeRefused, accept_authenticated

_BACKLOG = 64
_AHEAD = 2  # requests on their way on each connection


def listen(address: str) -> socket.socket:
    """A listening socket on the address of this node; any free port."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def receive_state(
    listener: socket.socket,
    sockets: Sockets,
    secret: bytes,
    state: State,
    timeout_s: float,
    report: Report = unheard,
    *,
    sources: Sequence[int] = (0,),
    check: Callable[[], None] = unchecked,
) -> Moved:
    """From `sources` (ranks; the first one sends what they may differ in) into `state`.

    timeout_s: longest silence of a source that was asked for something. Raises OSError (also when a fence cut it),
    LayoutMismatch, RecoveryFailed, and what `check` raises.
    """
    tally = Tally(report)
    with Crew(sockets, check) as crew:
        crew.cover(listener)
        connections: list[socket.socket] = []

        def greet() -> tuple[socket.socket, Hello]:
            connection = _accept(crew, listener, secret)
            tune(connection, timeout_s)
            hello = receive_message(connection, Hello)
            if hello.source not in sources:
                raise RecoveryFailed(f"rank {hello.source} sends a state, but it is not one of {list(sources)}")
            connections.append(connection)
            return connection, hello

        early = [greet()]
        while (first := next((hello for _, hello in early if hello.source == sources[0]), None)) is None:
            early.append(greet())
        try:
            manifest = _prepared(state, first)
            for _, hello in early:
                _compare(manifest, hello, sources[0])
        except RecoveryFailed as error:
            _finish(connections, Done(error=str(error)))
            raise
        specs = manifest.specs()
        memory, requests = Memory(state.tensors(), specs), Requests(cut(specs), sources, [spec.name for spec in specs])
        memory.settle()
        crew.on_end(requests.end)
        missing = dict.fromkeys(sources, 1)  # connections that are still to come

        def refuse(error: RecoveryFailed) -> None:
            requests.fail(error)
            _shut(listener)  # nobody else has to come

        def pull(connection: socket.socket, source: int) -> None:
            try:
                _pull(connection, source, requests, memory, tally, refuse)
            except OSError:
                if requests.error is None:  # once refused, sources may go
                    raise

        def admit(connection: socket.socket, hello: Hello) -> None:
            missing[hello.source] += hello.streams - 2 if hello.manifest else -1
            if hello.manifest is not None:
                send_message(connection, Ready())
            crew.start(lambda: pull(connection, hello.source))

        for connection, hello in early:
            admit(connection, hello)
        while any(missing.values()) and requests.error is None:
            try:
                connection, hello = greet()
                _compare(manifest, hello, sources[0])
                admit(connection, hello)
            except LayoutMismatch as error:
                refuse(error)
            except OSError:
                if requests.error is None:
                    raise
        crew.join()
        if requests.error is not None:
            _finish(connections, Done(error=str(requests.error)))
            raise requests.error
        state.finish(manifest)
        digest = combined(requests.digests())
        _finish(connections, Done(digest=digest))
    return Moved(tally.num_bytes, digest, manifest)


def load(holding: Holding, state: State) -> Moved:
    """Into `state` what this rank holds itself; no network, no second copy. Raises LayoutMismatch."""
    state.prepare(holding.manifest)
    num_bytes = 0
    with torch.no_grad():
        for tensor, kept in zip(state.tensors(), holding.tensors, strict=True):
            is_alike = kept.dtype == tensor.dtype and kept.shape == tensor.shape
            tensor.copy_(kept if is_alike else kept.view(tensor.dtype).view(tensor.shape))
            num_bytes += tensor.nbytes
    state.finish(holding.manifest)
    return Moved(num_bytes, "", holding.manifest)


def _accept(crew: Crew, listener: socket.socket, secret: bytes) -> socket.socket:
    """The next connection that knows the secret. Strangers (port scanners) are dropped one after the other."""
    while True:
        connection, peer = listener.accept()
        try:
            accept_authenticated(connection, secret)
        except HandshakeRefused as err:
            connection.close()
            logger.warning("restore: refused a connection from %s: %s", peer[0], err)
        else:
            return crew.add(connection)


def _prepared(state: State, hello: Hello) -> Manifest:
    if hello.manifest is None:
        raise RecoveryFailed(f"rank {hello.source} has not said what it sends")
    state.prepare(hello.manifest)
    return hello.manifest


def _compare(manifest: Manifest, hello: Hello, first: int) -> None:
    """What several sources send has to be parts of one state. Raises LayoutMismatch."""
    other = hello.manifest
    if other is None:
        return
    if other.v != manifest.v:
        what = f"step {manifest.v} and step {other.v}"
    elif _shape(other) != _shape(manifest):
        what = "other tensors"
    else:
        return
    raise LayoutMismatch(f"rank {first} and rank {hello.source} are to send parts of one state, but hold {what}")


def _shape(manifest: Manifest) -> object:
    return manifest.model, [(each.sizes, each.tensors, each.order) for each in manifest.optimizers]


def _pull(
    connection: socket.socket,
    source: int,
    requests: Requests,
    memory: Memory,
    tally: Tally,
    refuse: Callable[[RecoveryFailed], None],
) -> None:
    """Ask one connection for one piece after the other, until there is nothing more to ask for."""
    stage = memory.stage()
    asked: deque[Request] = deque()
    while True:
        while len(asked) < _AHEAD and (request := requests.take(source, wait=not asked)):
            send_message(connection, Want(request.piece.number, request.check))
            asked.append(request)
        if not asked:
            return
        request = asked.popleft()
        if request.check:
            if wrong := requests.compared(request.piece, source, _receive_digest(connection)):
                refuse(RecoveryFailed(wrong))
            continue
        digest = receive_piece(connection, stage.views(request.piece))
        if digest != _receive_digest(connection):
            text = f"{requests.name(request.piece)} arrived from rank {source} with other bytes than it left"
            refuse(RecoveryFailed(f"{text}: memory or network of this node is not sound"))
            continue
        stage.scatter()
        tally.add(request.piece.num_bytes)
        requests.arrived(request.piece, source, digest)


def receive_piece(connection: socket.socket, views: list[memoryview]) -> bytes:
    """Returns the digest of what has arrived."""
    digest = Digest()
    for portion in portions(views):
        receive_all(connection, portion)
        digest.update(portion)
    return digest.value()


def _receive_digest(connection: socket.socket) -> bytes:
    digest = bytearray(DIGEST_BYTES)
    receive_all(connection, [memoryview(digest)])
    return bytes(digest)


def _finish(connections: Sequence[socket.socket], done: Done) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # then it is lost, and a fence follows
            send_message(connection, done)


def _shut(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
