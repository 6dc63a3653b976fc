"""The last resort after a fence: a gloo operation that does not end although its connections are shut.

gloo can lose an operation (see `gloo`): when a peer is killed in the very moment in which our loop answers it, the
write fails inside the loop and nobody is told. Seen in 1 of 200 kills with 3 ranks in a tight loop on 2 busy cores. The
main thread then waits for gloo's full time-out. It cannot be woken, so this process gives its rank up and is replaced.

What a stuck operation looks like: a worker thread of gloo that sits in one and the same futex wait *with* a time-out
(an idle one waits without). A main thread that merely computes for long is therefore never taken for stuck.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from flashrec.runtime.progress import Progress

_GLOO_THREAD = "pt_gloo_runloop"
_FUTEX_CALLS = ("202", "98")  # x86_64, aarch64
_LOOK_INTERVAL_S = 0.2
_IDLE_INTERVAL_S = 0.001

Operation = tuple[str, str]  # thread id, futex address


def gloo_threads() -> list[str]:
    """Ids of the threads in which gloo's operations run."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as comm:  # it may be gone
            if comm.read().strip() == _GLOO_THREAD:
                found.append(thread)
    return found


def waiting_operation(thread: str) -> Operation | None:
    """What this thread of gloo waits for a peer with; None when it does not. Raises OSError: that cannot be seen."""
    with open(f"/proc/self/task/{thread}/syscall") as call:
        fields = call.read().split()
    is_waiting = len(fields) > 4 and fields[0] in _FUTEX_CALLS and int(fields[4], 16) != 0
    return (thread, fields[1]) if is_waiting else None


def waiting_operations() -> set[Operation]:
    """gloo operations of this process that wait for a peer right now. Empty, too, where /proc does not show it."""
    found: set[Operation] = set()
    for thread in gloo_threads():
        with contextlib.suppress(OSError):  # the thread is gone, or the kernel does not tell
            operation = waiting_operation(thread)
            if operation is not None:
                found.add(operation)
    return found


def is_idle() -> bool:
    """True when all threads of gloo wait for work. False, too, where that cannot be seen."""
    for thread in gloo_threads():
        try:
            with open(f"/proc/self/task/{thread}/syscall") as call:
                fields = call.read().split()
        except FileNotFoundError:  # it has ended
            continue
        except OSError:
            return False
        if len(fields) <= 4 or fields[0] not in _FUTEX_CALLS or int(fields[4], 16) != 0:
            return False
    return True


def await_idle(timeout_s: float) -> bool:
    """Return when no operation is in gloo's threads any more. False: one stays, or that cannot be seen."""
    deadline = time.monotonic() + timeout_s
    while not is_idle():
        if time.monotonic() > deadline:
            return False
        time.sleep(_IDLE_INTERVAL_S)
    return True


def watch(progress: Progress, generation: int, timeout_s: float, give_up: Callable[[str], None]) -> None:
    """In a thread: until this rank has reported for `generation`, give up when one operation waits for `timeout_s`."""
    threading.Thread(
        target=_watch, args=(progress, generation, timeout_s, give_up), name="flashrec-stuck", daemon=True
    ).start()


def _watch(progress: Progress, generation: int, timeout_s: float, give_up: Callable[[str], None]) -> None:
    since: dict[Operation, float] = {}
    while progress.reported < generation:
        now = time.monotonic()
        since = {operation: since.get(operation, now) for operation in waiting_operations()}
        if any(now - start > timeout_s for start in since.values()):
            give_up(f"a collective did not end within {timeout_s:g} s after the fence of generation {generation}")
            return
        time.sleep(_LOOK_INTERVAL_S)
