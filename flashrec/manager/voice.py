"""The manager's words for people, in the job's output."""

from __future__ import annotations

import contextlib
import os

_STDERR = 2


def say(text: str) -> None:
    """One line. If the output is full or closed, the job goes on without."""
    with contextlib.suppress(OSError):  # not through sys.stderr: what it cannot write spoils the exit code
        os.write(_STDERR, f"flashrec: {text}\n".encode(errors="backslashreplace"))
