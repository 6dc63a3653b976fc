"""One page of memory that a worker shares with its agent: where it is now, readable also when it says nothing.

A worker whose interpreter lock is held sends no heartbeat, so the last one may be older than what it does now: in a job
of fast steps it says 'step' while the script has long begun to write a checkpoint. Writing here costs no system call.
The file lies beside the agent's socket (mode 0600) and goes with the worker.

    bytes 0-15    where, padded with zeros      bytes 16-127    why it may stand still (UTF-8, may be cut)
"""

from __future__ import annotations

import functools
import mmap
import os
from pathlib import Path

_WHERE_BYTES, _PAGE_BYTES = 16, 128
WHERE = slice(0, _WHERE_BYTES)


class Page:
    """The worker's end."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _PAGE_BYTES)
            self.memory = mmap.mmap(fd, _PAGE_BYTES)
        finally:
            os.close(fd)

    def write_quiet(self, quiet: str) -> None:
        self.memory[_WHERE_BYTES:] = pad(quiet, _PAGE_BYTES - _WHERE_BYTES)


@functools.lru_cache(maxsize=64)
def pad(text: str, num_bytes: int = _WHERE_BYTES) -> bytes:
    """As it stands on the page."""
    return text.encode()[:num_bytes].ljust(num_bytes, b"\0")


def read(path: Path) -> tuple[str, str] | None:
    """(where, quiet); None when there is no page, or nothing is on it yet."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    where = content[:_WHERE_BYTES].rstrip(b"\0").decode(errors="replace")
    quiet = content[_WHERE_BYTES:_PAGE_BYTES].rstrip(b"\0").decode(errors="ignore")
    return (where, quiet) if where else None
