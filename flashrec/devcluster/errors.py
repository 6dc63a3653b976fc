"""What goes wrong in a dev cluster, told so that the reader knows what to do next, and the one way to wait.

Every wait of this package is bounded and says at its end what it was waiting for and what the daemon concerned wrote
last: a cluster that hangs in silence teaches nobody anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


class DevClusterError(Exception):
    """Something the user can act on; the message names the remedy where there is one."""


class NotReadyError(DevClusterError):
    """A bounded wait ran out."""


def wait_until(
    is_done: Callable[[], bool],
    *,
    timeout_s: float,
    what: str,
    explain: Callable[[], str] = lambda: "",
    interval_s: float = 0.02,
) -> None:
    """Return as soon as `is_done()`; raise NotReadyError with `what` and `explain()` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() >= deadline:
            reason = explain().rstrip()
            raise NotReadyError(f"{what}: not within {timeout_s:g} s" + (f"\n{reason}" if reason else ""))
        time.sleep(interval_s)


def log_tail(path: Path, num_lines: int = 12) -> str:
    """The last lines of a daemon's log, headed by its path; says so if there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()[-num_lines:]
    except OSError as error:
        return f"{path}: {error.strerror}"
    return "\n".join([f"last lines of {path}:", *(f"  {line}" for line in lines)])
