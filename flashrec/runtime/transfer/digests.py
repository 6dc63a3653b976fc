"""One SHA-256 per tensor, beside the copying, and one over all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_BUFFERS_PER_CALL = 512
_BYTES_PER_BATCH = 16 << 20
_HASH_THREADS = 2


def batched(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
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


def hashing() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="flashrec-digest")


def digests_of(views: list[memoryview]) -> list[bytes]:
    return [hashlib.sha256(view).digest() for view in views]


def combined(digests: tuple[bytes, ...]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()
