"""Gets the main thread out of what it waits for in Python when a fence comes: a data loader, a lock, an event, a sleep.

A collective ends by itself (`gloo.shut`), and whoever computes finds the fence at the next one. But a survivor that
waits in Python, perhaps for something that never comes, would hold all others up. So, from the control plane's side:

    fence ── interrupt_after_s ──► a signal, if the main thread sleeps ──► StepInterrupted, raised by its handler
          ── interrupt_timeout_s ─► gives up, if it still sleeps in the same call: the rank is replaced

It is raised only inside an open block before the vote, where doing the step again is what a failure leads to anyway:
not while an optimizer updates, not after it, not between the steps, and not out of code of ours (`_OURS`), whose state
and whose half-sent messages must stay whole. A thread that computes is never interrupted.

Not to be had by a signal: a library that holds the interpreter's lock (nothing of us runs then; the agent misses our
beats), and a call that the kernel or a C library goes on with (a dead file server). What does not report at all is
replaced by the manager, `recovery.fence_timeout_s` after the fence.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from flashrec.runtime.board import Board
from flashrec.runtime.errors import StepInterrupted
from flashrec.runtime.limits import Limits
from flashrec.runtime.progress import Progress
from flashrec.runtime.timeline import logger

DEFAULT_SIGNAL = "SIGRTMAX-4"  # SIGRTMAX-3 is that of `stacks`
_LOOK_INTERVAL_S = 0.1
_LOOKS = 3  # asleep in so many, one after the other: waits, and does not compute with short pauses
_OURS = re.compile(r"flashrec\.runtime\.(?!(data|loading|picks|streams)$)")  # those begin again after any error
_INJECTED = re.compile(r"flashrec\.testing\.")  # a fault that a test injects stands as long as the test says


def signal_of(name: str) -> int | None:
    """'SIGUSR2', 'SIGRTMAX-4', '40'; None for 'none'. Raises ValueError."""
    if name == "none":
        return None
    found = re.fullmatch(r"(SIG[A-Z0-9]+)([+-]\d+)?|(\d+)", name)
    if not found:
        raise ValueError(f"{name!r} is no signal: write for example SIGUSR2, SIGRTMAX-4, or none")
    base = signal.Signals.__members__.get(found[1] or "", 0)
    number = int(found[3]) if found[3] else base and base + int(found[2] or 0)
    if number not in signal.valid_signals():  # the enumeration names only the first and last real-time signals
        raise ValueError(f"{name!r} is no signal of this system")
    return number


class Interrupter:
    """One in each process; `may_interrupt` says whether the step that is open may be done again."""

    def __init__(
        self,
        board: Board,
        progress: Progress,
        limits: Limits,
        give_up: Callable[[str], None],
        number: int | None,
    ) -> None:
        """number: the signal, None to send none. Raises RuntimeError when the script has a handler for it."""
        self._board, self._progress, self._limits = board, progress, limits
        self._give_up, self._number = give_up, number
        self._main = threading.main_thread()
        self.may_interrupt: Callable[[], bool] = lambda: False
        if number is None:
            return
        if signal.getsignal(number) is not signal.SIG_DFL:
            raise RuntimeError(
                f"signal {number} has a handler already, but flashrec needs it for a rank that waits in Python after a "
                "failure: set FLASHREC_INTERRUPT_SIGNAL to one that nobody uses, or to none"
            )
        if threading.current_thread() is not self._main:
            logger.warning("flashrec.init() was not called in the main thread: what waits in Python is not interrupted")
            self._number = None
            return
        signal.signal(number, self._handle)

    def on_fence(self, generation: int) -> None:
        """A generation was announced; from the control thread."""
        threading.Thread(target=self._watch, args=(generation,), name="flashrec-interrupt", daemon=True).start()

    def _is_over(self, generation: int) -> bool:
        return self._progress.reported >= generation or self._board.announced > generation or self._board.complete

    def _watch(self, generation: int) -> None:
        start = time.monotonic()
        next_signal = start + self._limits.interrupt_after_s
        num_asleep, call, since = 0, "", start
        while not self._is_over(generation):
            time.sleep(_LOOK_INTERVAL_S)
            now, state = time.monotonic(), self._state()
            num_asleep = num_asleep + 1 if state in ("S", "") else 0  # "": cannot be seen
            may_interrupt = self.may_interrupt() and not _is_in(_INJECTED, self._frame())
            current = self._call()  # before a signal, which wakes it for a moment whatever it goes back to
            is_due = num_asleep >= _LOOKS and now >= next_signal
            if is_due and may_interrupt and self._has_handler():
                next_signal = now + self._limits.interrupt_after_s  # the script may wait again while it unwinds
                signal.pthread_kill(self._main.ident or 0, self._number or 0)
            if current != call or not current or not may_interrupt:
                call, since = current, now
            elif now - max(since, start) > self._limits.interrupt_timeout_s and not self._is_over(generation):
                self._give_up(
                    f"the main thread did not leave system call {call.split()[0]} (state {state}) within "
                    f"{self._limits.interrupt_timeout_s:g} s after the fence of generation {generation}"
                )
                return

    def _has_handler(self) -> bool:
        if self._number is None:
            return False
        if signal.getsignal(self._number) != self._handle:
            logger.warning("signal %d has got another handler: what waits in Python is not interrupted", self._number)
            self._number = None
        return self._number is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._board.announced <= self._progress.generation or not self.may_interrupt():
            return
        if _is_in(_OURS, frame) or _is_in(_INJECTED, frame):
            return
        where = (
            f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
        )  # not logged here: the log may wait, too
        raise StepInterrupted(f"generation {self._board.announced} was announced while this rank waited at {where}")

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._main.ident or 0)

    def _state(self) -> str:
        """'R', 'S', 'D', … of the main thread; "" where it cannot be seen."""
        return _read(f"/proc/self/task/{self._main.native_id}/stat").rpartition(")")[2].strip()[:1]

    def _call(self) -> str:
        """The system call that the main thread is in, with its arguments; "" when it runs, or cannot be seen."""
        call = _read(f"/proc/self/task/{self._main.native_id}/syscall")
        return "" if call.startswith("running") else call


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _is_in(code: re.Pattern[str], frame: FrameType | None) -> bool:
    while frame is not None:
        if code.match(frame.f_globals.get("__name__", "")):
            return True
        frame = frame.f_back
    return False
