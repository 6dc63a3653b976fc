"""The journal of a job: one JSON object a line, `JOBDIR/journal.jsonl`. Events replay to the same state of the machine.

Every line has seq, mono (seconds, this machine's monotonic clock), wall (UTC) and kind: 'event', 'effect', 'phase',
'verdict' or 'note'. A full disk must not stop a recovery: lines that cannot be written are kept (up to a bound) and
written when there is room again; the operator is told once.
"""

from __future__ import annotations

import collections
import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from flashrec.core.effects import AnyEffect, ChangePhase
from flashrec.core.events import AnyEvent

MAX_KEPT_LINES = 100_000


class Journal:
    """Appends lines; never raises for a full or failing disk. `complain` gets one sentence per outage."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self._path, self._complain = path, complain
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._kept: collections.deque[bytes] = collections.deque(maxlen=MAX_KEPT_LINES)
        self._failing = False
        self._seq = 0

    def event(self, event: AnyEvent, now: float, generation: int, phase: str) -> None:
        """`now` is the time the machine was given, so that a replay gives it the same."""
        self._write(kind="event", generation=generation, phase=phase, event=event, mono=now)

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
        self._flush()
        os.close(self._fd)

    def _write(self, **fields: Any) -> None:
        self._seq += 1
        stamp = {
            "seq": self._seq,
            "mono": time.monotonic(),
            "wall": datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        }
        self._kept.append(msgspec.json.encode(stamp | fields) + b"\n")
        self._flush()

    def _flush(self) -> None:
        try:
            while self._kept:
                line = self._kept[0]
                written = os.write(self._fd, line)
                self._kept.popleft()
                if written < len(line):
                    self._kept.appendleft(line[written:])
        except OSError as err:
            if not self._failing:
                self._complain(f"cannot write {self._path}: {err.strerror}; the job goes on, lines are kept in memory")
            self._failing = True
            return
        self._failing = False
