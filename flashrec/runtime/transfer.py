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
import hashlib
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from flashrec.runtime import codec
from flashrec.runtime.errors import RecoveryFailed
from flashrec.runtime.state import Manifest, State
from flashrec.runtime.timeline import logger
from flashrec.transport.handshake import HandshakeRefused, accept_authenticated, connect_authenticated
from flashrec.wire.frames import ProtocolError, frame

MAX_MANIFEST_BYTES = 1 << 30
_BUFFERS_PER_CALL = 512
_BYTES_PER_BATCH = 16 << 20
_LENGTH = struct.Struct("!I")
_SOCKET_BUFFER_BYTES = 4 << 20
_HASH_THREADS = 2
_STRANGER_TIMEOUT_S = 2.0
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


def _unheard(num_bytes: int) -> None:
    """A report that nobody listens to."""


def listen(address: str) -> socket.socket:
    """A listening socket on the address of this node; any free port."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, 0), family=family, backlog=4)


def receive_state(
    listener: socket.socket, sockets: Sockets, secret: bytes, state: State, timeout_s: float, report: Report = _unheard
) -> Moved:
    """Target side. Raises OSError (also when a fence cut it), LayoutMismatch, RecoveryFailed."""
    with sockets.watch(_accept_source(listener, secret)) as connection:
        _tune(connection, timeout_s)
        manifest = _receive(connection, Manifest)
        try:
            state.prepare(manifest)
        except RecoveryFailed as err:
            _send(connection, Verdict(str(err)))
            raise
        _send(connection, Verdict(""))
        with _hashing() as pool, torch.no_grad():
            digests, num_bytes = _receive_tensors(connection, state.tensors(), pool, report)
        if _receive(connection, Digests).digests != digests:
            text = "the state arrived with other bytes than it left: memory or network of this node is not sound"
            _send(connection, Verdict(text))
            raise RecoveryFailed(text)
        state.finish(manifest)
        _send(connection, Verdict(""))
    return Moved(num_bytes, _combined(digests), manifest)


def send_state(
    address: Address,
    sockets: Sockets,
    secret: bytes,
    state: State,
    v: int,
    parts: dict[str, bytes],
    timeout_s: float,
    report: Report = _unheard,
) -> Moved:
    """Source side. Raises OSError (also when a fence cut it), CannotEncode, RecoveryFailed."""
    manifest = state.manifest(v, parts)
    with sockets.watch(socket.create_connection((address.host, address.port), timeout=timeout_s)) as connection:
        _tune(connection, timeout_s)
        connect_authenticated(connection, secret)
        _send(connection, manifest)
        _check(connection)
        with _hashing() as pool:
            digests, num_bytes = _send_tensors(connection, state.tensors(), pool, report)
        _send(connection, Digests(digests))
        _check(connection)
    return Moved(num_bytes, _combined(digests), manifest)


def _accept_source(listener: socket.socket, secret: bytes) -> socket.socket:
    """The first connection that knows the secret. Strangers (port scanners) are dropped one after the other."""
    while True:
        connection, peer = listener.accept()
        try:
            accept_authenticated(connection, secret, _STRANGER_TIMEOUT_S)
        except HandshakeRefused as err:
            connection.close()
            logger.warning("restore: refused a connection from %s: %s", peer[0], err)
        else:
            return connection


def _send_tensors(
    connection: socket.socket, tensors: Sequence[torch.Tensor], pool: ThreadPoolExecutor, report: Report
) -> tuple[tuple[bytes, ...], int]:
    hashes: list[Future[list[bytes]]] = []
    num_bytes = 0
    for batch in _batched(tensors):
        views = [codec.tensor_bytes(tensor.detach().cpu().contiguous()) for tensor in batch]
        hashes.append(pool.submit(_hash, views))
        num_bytes += sum(map(len, views))
        _send_all(connection, views)
        report(num_bytes)
    return tuple(digest for future in hashes for digest in future.result()), num_bytes


def _receive_tensors(
    connection: socket.socket, tensors: Sequence[torch.Tensor], pool: ThreadPoolExecutor, report: Report
) -> tuple[tuple[bytes, ...], int]:
    hashes: list[Future[list[bytes]]] = []
    num_bytes = 0
    for batch in _batched(tensors):
        # Memory of the tensor itself wherever it is plain CPU memory; a staging copy otherwise.
        stages = [
            tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else _stage(tensor) for tensor in batch
        ]
        views = [codec.tensor_bytes(stage) for stage in stages]
        _receive_all(connection, views)
        hashes.append(pool.submit(_hash, views))
        num_bytes += sum(map(len, views))
        for tensor, stage in zip(batch, stages, strict=True):
            if stage is not tensor:
                tensor.copy_(stage)
        report(num_bytes)
    return tuple(digest for future in hashes for digest in future.result()), num_bytes


def _stage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _batched(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors that travel in one system call and are hashed by one task."""
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        batch.append(tensor)
        size += tensor.nbytes
        if len(batch) == _BUFFERS_PER_CALL or size >= _BYTES_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _send_all(connection: socket.socket, views: list[memoryview]) -> None:
    views = [view for view in views if len(view)]
    while views:
        views = _advance(views, connection.sendmsg(views))


def _receive_all(connection: socket.socket, views: list[memoryview]) -> None:
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


def _hashing() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="flashrec-digest")


def _hash(views: list[memoryview]) -> list[bytes]:
    return [hashlib.sha256(view).digest() for view in views]


def _combined(digests: tuple[bytes, ...]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _tune(connection: socket.socket, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def _send(connection: socket.socket, message: msgspec.Struct) -> None:
    connection.sendall(frame(msgspec.msgpack.encode(message), MAX_MANIFEST_BYTES))


def _receive(connection: socket.socket, kind: type[T]) -> T:
    head = bytearray(_LENGTH.size)
    _receive_all(connection, [memoryview(head)])
    (size,) = _LENGTH.unpack(head)
    if size > MAX_MANIFEST_BYTES:
        raise ProtocolError(f"frame of {size} bytes is over the limit of {MAX_MANIFEST_BYTES}")
    payload = bytearray(size)
    _receive_all(connection, [memoryview(payload)])
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as err:
        raise ProtocolError(f"not a {kind.__name__}: {err}") from err


def _check(connection: socket.socket) -> None:
    error = _receive(connection, Verdict).error
    if error:
        # The target ends with this error and is replaced; the source is sound and waits for the fence.
        raise ConnectionError(f"the target refuses the state: {error}")
