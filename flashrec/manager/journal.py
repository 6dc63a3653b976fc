"""The journal of a job: one JSON object a line, `JOBDIR/journal.jsonl`. Events replay to the same state of the machine.

Every line has seq, mono (seconds, this machine's monotonic clock), wall (UTC) and kind: 'event', 'effect', 'phase',
'verdict' or 'note'. A thread writes, because a shared filesystem that hangs must not hold up the loop that renews the
agents' leases. A full disk must not stop a recovery either: lines that cannot be written are kept (up to a bound) and
written when there is room again; the operator is told once.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from flashrec.core.effects import AnyEffect, ChangePhase
from flashrec.core.events import AnyEvent

MAX_KEPT_LINES = 400_000
MAX_LINES_AT_ONCE = 1000
GATHER_S = 0.005  # where there is a line there are more
RETRY_S = 1.0
CLOSE_TIMEOUT_S = 5.0


class Journal:
    """Appends lines; never waits and never raises for a full or failing disk. `complain` (called in the writing
    thread) gets one sentence per outage."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self._path, self._complain = path, complain
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._changed = threading.Condition()
        self._kept: collections.deque[bytes] = collections.deque(maxlen=MAX_KEPT_LINES)
        self._closing = False
        self._rests = False  # the thread waits for a line, or is about to
        self._seq = 0
        self._heard_at, self._heard_wall = -1.0, ""
        self._writer = threading.Thread(target=self._write_all, name="flashrec-journal", daemon=True)
        self._writer.start()

    @property
    def num_kept(self) -> int:
        """Lines that nobody has begun to write yet."""
        return len(self._kept)

    def event(self, event: AnyEvent, now: float, generation: int, phase: str) -> None:
        """`now` is the time the machine was given, so that a replay gives it the same. Most lines are events: thousands
        of ranks say the same in one recovery."""
        self._seq += 1
        if now != self._heard_at:  # what was said together has one time
            self._heard_at, self._heard_wall = now, _wall()
        self._keep(_encode(_EventLine(self._seq, now, self._heard_wall, "event", generation, str(phase), event)))

    def effect(self, effect: AnyEffect, generation: int) -> None:
        if isinstance(effect, ChangePhase):
            self._write(
                kind="phase",
                **{"from": effect.before, "to": effect.after},
                generation=effect.generation,
                reason=effect.reason,
            )
        else:
            self._write(kind="effect", generation=generation, effect=effect)

    def verdict(self, subject: str, state: str, reason: str, generation: int) -> None:
        self._write(kind="verdict", subject=subject, state=state, reason=reason, generation=generation)

    def note(self, what: str, **fields: Any) -> None:
        self._write(kind="note", what=what, **fields)

    def close(self) -> None:
        """Write what is left, within CLOSE_TIMEOUT_S; what comes later is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._writer.join(CLOSE_TIMEOUT_S)

    def discard(self) -> None:
        """Nothing has begun: leave no file behind."""
        self._path.unlink(missing_ok=True)

    def _write(self, **fields: Any) -> None:
        self._seq += 1
        self._keep(_encode({"seq": self._seq, "mono": time.monotonic(), "wall": _wall()} | fields))

    def _keep(self, line: bytes) -> None:
        """Without the lock, as the thread takes lines without it: the loop would have to wait for it."""
        if self._closing:
            return
        self._kept.append(line)
        if self._rests:
            with self._changed:
                self._changed.notify()

    def _write_all(self) -> None:
        """The writing thread. It takes many lines at once, since the loop has to wait whenever it wakes up. A line that
        was begun is ended before the next one, whatever happens between."""
        rest, failing = b"", False
        while True:
            with self._changed:
                self._rests = True  # whoever adds a line from now on wakes us up, and the lines before are seen here
                if not rest and not self._kept:
                    if self._closing:
                        break
                    self._changed.wait()
                    self._rests = False
                    self._changed.wait_for(lambda: self._closing, GATHER_S)
                    continue
                self._rests = False
            if not rest:
                rest = b"".join(self._kept.popleft() for _ in range(min(len(self._kept), MAX_LINES_AT_ONCE)))
            try:
                rest = rest[os.write(self._fd, rest) :]
                failing = False
            except OSError as err:
                if not failing:
                    self._complain(f"cannot write {self._path}: {err.strerror}; the job goes on, lines are kept")
                failing = True
                with self._changed:
                    if self._closing:
                        break
                    self._changed.wait(RETRY_S)
        os.close(self._fd)


class _EventLine(msgspec.Struct, gc=False):
    """The line of an event, faster than a dict."""

    seq: int
    mono: float
    wall: str
    kind: str
    generation: int
    phase: str
    event: AnyEvent


def _wall() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def _encode(line: dict[str, Any] | _EventLine) -> bytes:
    try:
        return msgspec.json.encode(line) + b"\n"
    except UnicodeEncodeError:  # a command line or a path that is no UTF-8
        return json.dumps(msgspec.to_builtins(line)).encode() + b"\n"
