"""The source's end of a restore, see `protocol`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from flashrec.runtime import codec
from flashrec.runtime.transfer.digests import batched, combined, digests_of, hashing
from flashrec.runtime.transfer.holding import Holding
from flashrec.runtime.transfer.protocol import (
    Address,
    Digests,
    Moved,
    Report,
    Sockets,
    Verdict,
    receive_message,
    send_all,
    send_message,
    tune,
    unheard,
)
from flashrec.transport.handshake import connect_authenticated


def send(
    address: Address,
    sockets: Sockets,
    secret: bytes,
    holding: Holding,
    timeout_s: float,
    report: Report = unheard,
) -> Moved:
    """Send what is held to the target at `address`. Raises OSError, also when a fence cut it."""
    with sockets.watch(socket.create_connection((address.host, address.port), timeout=timeout_s)) as connection:
        tune(connection, timeout_s)
        connect_authenticated(connection, secret)
        send_message(connection, holding.manifest)
        _check(connection)
        with hashing() as pool:
            digests, num_bytes = _send_tensors(connection, holding.tensors, pool, report)
        send_message(connection, Digests(digests))
        _check(connection)
    return Moved(num_bytes, combined(digests), holding.manifest)


def _send_tensors(
    connection: socket.socket, tensors: Sequence[torch.Tensor], pool: ThreadPoolExecutor, report: Report
) -> tuple[tuple[bytes, ...], int]:
    hashes: list[Future[list[bytes]]] = []
    num_bytes = 0
    for batch in batched(tensors):
        views = [codec.tensor_bytes(tensor.detach().cpu().contiguous()) for tensor in batch]
        hashes.append(pool.submit(digests_of, views))
        num_bytes += sum(map(len, views))
        send_all(connection, views)
        report(num_bytes)
    return tuple(digest for future in hashes for digest in future.result()), num_bytes


def _check(connection: socket.socket) -> None:
    error = receive_message(connection, Verdict).error
    if error:
        # The target ends with this error and is replaced; the source is sound and waits for the fence.
        raise ConnectionError(f"the target refuses the state: {error}")
