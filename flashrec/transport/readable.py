"""Waiting for one of several descriptors. select.select() takes none above 1023, which a job of many ranks has."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any


def await_readable(files: Sequence[Any], timeout_s: float | None) -> list[Any]:
    """Those of `files` (sockets, pipes, descriptors) that can be read or have ended, after at most `timeout_s`; None:
    however long it takes."""
    poll = select.poll()
    by_number = {file if isinstance(file, int) else file.fileno(): file for file in files}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(None if timeout_s is None else 1e3 * max(0.0, timeout_s))]
