"""The target's end of a restore, see `protocol`; and a restore from memory that this rank holds itself."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from flashrec.runtime import codec
from flashrec.runtime.errors import RecoveryFailed
from flashrec.runtime.state import Manifest, State
from flashrec.runtime.timeline import logger
from flashrec.runtime.transfer.digests import batched, combined, digests_of, hashing
from flashrec.runtime.transfer.holding import Holding
from flashrec.runtime.transfer.protocol import (
    Digests,
    Moved,
    Report,
    Sockets,
    Verdict,
    receive_all,
    receive_message,
    send_message,
    tune,
    unheard,
)
from flashrec.transport.handshake import HandshakeRefused, accept_authenticated

_STRANGER_TIMEOUT_S = 2.0


def listen(address: str) -> socket.socket:
    """A listening socket on the address of this node; any free port."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, 0), family=family, backlog=4)


def receive_state(
    listener: socket.socket, sockets: Sockets, secret: bytes, state: State, timeout_s: float, report: Report = unheard
) -> Moved:
    """Target side. Raises OSError (also when a fence cut it), LayoutMismatch, RecoveryFailed."""
    with sockets.watch(_accept_source(listener, secret)) as connection:
        tune(connection, timeout_s)
        manifest = receive_message(connection, Manifest)
        try:
            state.prepare(manifest)
        except RecoveryFailed as err:
            send_message(connection, Verdict(str(err)))
            raise
        send_message(connection, Verdict(""))
        with hashing() as pool, torch.no_grad():
            digests, num_bytes = _receive_tensors(connection, state.tensors(), pool, report)
        if receive_message(connection, Digests).digests != digests:
            text = "the state arrived with other bytes than it left: memory or network of this node is not sound"
            send_message(connection, Verdict(text))
            raise RecoveryFailed(text)
        state.finish(manifest)
        send_message(connection, Verdict(""))
    return Moved(num_bytes, combined(digests), manifest)


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


def _receive_tensors(
    connection: socket.socket, tensors: Sequence[torch.Tensor], pool: ThreadPoolExecutor, report: Report
) -> tuple[tuple[bytes, ...], int]:
    hashes: list[Future[list[bytes]]] = []
    num_bytes = 0
    for batch in batched(tensors):
        # Memory of the tensor itself wherever it is plain CPU memory; a staging copy otherwise.
        stages = [
            tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else _stage(tensor) for tensor in batch
        ]
        views = [codec.tensor_bytes(stage) for stage in stages]
        receive_all(connection, views)
        hashes.append(pool.submit(digests_of, views))
        num_bytes += sum(map(len, views))
        for tensor, stage in zip(batch, stages, strict=True):
            if stage is not tensor:
                tensor.copy_(stage)
        report(num_bytes)
    return tuple(digest for future in hashes for digest in future.result()), num_bytes


def _stage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
