"""One digest per piece, taken while its bytes are in the cache: before they leave, and as they arrive.

XXH3 with 128 bits, because what it has to find are faults of memory and network, not forgeries: connections are
authenticated (decision 0035). It reads 10 to 18 GB/s on a core where SHA-256 reads 1.1 to 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import xxhash

DIGEST_BYTES = 16
_PORTION_BYTES = 512 << 10  # fits the cache of a core


class Digest:
    """Of one piece."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, views: Sequence[memoryview]) -> None:
        for view in views:
            self._hash.update(view)

    def value(self) -> bytes:
        return self._hash.digest()


def portions(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes again, in lists of at most half a megabyte."""
    portion: list[memoryview] = []
    size = 0
    for view in views:
        at = 0
        while at < len(view):
            step = min(len(view) - at, _PORTION_BYTES - size)
            portion.append(view[at : at + step])
            at += step
            size += step
            if size == _PORTION_BYTES:
                yield portion
                portion, size = [], 0
    if portion:
        yield portion


def combined(digests: Sequence[bytes]) -> str:
    """One text for the digests of all pieces, in the order of the pieces."""
    return hashlib.sha256(b"".join(digests)).hexdigest()
