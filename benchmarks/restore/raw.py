"""What a restore is compared with: the same bytes over bare TCP, and a copy from memory to memory.

Bare TCP has the same socket options, the same number of connections, the same size of a system call and memory that is
there; no digests, no requests, no handshake. What remains is what the path gives to a Python process on these cores.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import torch

from flashrec.runtime import codec
from flashrec.runtime.transfer.digests import portions
from flashrec.runtime.transfer.protocol import receive_all, send_all, tune

_TIMEOUT_S = 60.0


def send(port: int, memory: torch.Tensor, streams: int) -> None:
    """memory: uint8."""

    def work(view: memoryview, number: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
            tune(connection, _TIMEOUT_S)
            connection.sendall(bytes([number]))
            for portion in portions([view]):
                send_all(connection, portion)
            connection.recv(1)  # the end

    _together([lambda view=view, number=i: work(view, number) for i, view in enumerate(_parts(memory, streams))])


def receive(listener: socket.socket, memory: torch.Tensor, streams: int) -> None:
    views = _parts(memory, streams)

    def work(connection: socket.socket) -> None:
        with connection:
            tune(connection, _TIMEOUT_S)
            for portion in portions([views[connection.recv(1)[0]]]):
                receive_all(connection, portion)

    connections = [listener.accept()[0] for _ in range(streams)]
    _together([lambda connection=connection: work(connection) for connection in connections])


def copy(into: torch.Tensor, memory: torch.Tensor) -> None:
    into.copy_(memory)


def _parts(memory: torch.Tensor, streams: int) -> list[memoryview]:
    return [codec.tensor_bytes(part) for part in memory.tensor_split(streams)]


def _together(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
