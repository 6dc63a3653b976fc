"""Reading `journal.jsonl` and `faults.jsonl`: tolerant about what is new or torn, and counting what it could not read.

The writer is `flashrec.manager.journal`; a line has seq, mono (seconds, CLOCK_MONOTONIC of the manager's node), wall
(UTC, ISO 8601) and kind. Fields and kinds that are not known here are passed over, so that an older report reads a
newer journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import msgspec

# Two clocks that started at the same boot agree to far less than this; those of two machines practically never do.
SAME_CLOCK_S = 5.0


class Line(msgspec.Struct, frozen=True, rename={"before": "from", "after": "to"}):
    """One line of the journal; which fields are there depends on `kind`."""

    seq: int
    mono: float
    wall: str
    kind: str
    generation: int | None = None
    before: str | None = None
    after: str | None = None
    reason: str = ""
    subject: str = ""
    state: str = ""
    what: str = ""
    job_id: int | str | None = None
    exit_code: int | None = None
    request: int | None = None
    companion: int | None = None
    rank: int | None = None
    own_bytes: int = 0
    held_bytes: int = 0
    wait_ms: float = 0.0
    steps: int = 0
    event: dict[str, Any] = {}
    effect: dict[str, Any] = {}

    @property
    def event_type(self) -> str:
        return str(self.event.get("type", ""))

    @property
    def effect_type(self) -> str:
        return str(self.effect.get("type", ""))


class FaultLine(msgspec.Struct, frozen=True):
    """One line of faults.jsonl, written by flashrec.testing: an injected fault and when it was done."""

    id: str
    kind: str
    place: str
    rank: int
    node: str
    mono: float
    wall: str
    step: int | None = None


@dataclass(frozen=True)
class Journal:
    """lines: in order of writing; is_torn: the last line is cut; unreadable: numbers (from 1) of other bad lines."""

    lines: tuple[Line, ...]
    is_torn: bool
    unreadable: tuple[int, ...]


def read_journal(content: bytes) -> Journal:
    """Decode a whole journal file."""
    lines, bad, is_torn = _decode(content, Line)
    return Journal(tuple(lines), is_torn, tuple(bad))


def read_faults(content: bytes, journal: Journal) -> tuple[FaultLine, ...]:
    """Decode faults.jsonl; `mono` is put on the journal's clock, by wall time if the fault's machine is another one."""
    faults, _, _ = _decode(content, FaultLine)
    if not journal.lines:
        return tuple(faults)
    offset = _offset(journal.lines[0])
    moved = (
        fault
        if abs(_offset(fault) - offset) < SAME_CLOCK_S
        else msgspec.structs.replace(fault, mono=_wall(fault) - offset)
        for fault in faults
    )
    return tuple(sorted(moved, key=lambda fault: fault.mono))


Stamped = TypeVar("Stamped", Line, FaultLine)


def _decode(content: bytes, kind: type[Stamped]) -> tuple[list[Stamped], list[int], bool]:
    """Lines, numbers of unreadable ones, and whether the last was torn."""
    decoder = msgspec.json.Decoder(kind)
    *whole, last = content.split(b"\n")
    numbered: Iterable[tuple[int, bytes]] = enumerate(whole, 1)
    lines, bad = [], []
    for number, raw in numbered:
        try:
            line = decoder.decode(raw)
            datetime.fromisoformat(line.wall)
            lines.append(line)
        except (msgspec.DecodeError, ValueError):
            bad.append(number)
    return lines, bad, bool(last)


def _wall(stamped: Line | FaultLine) -> float:
    return datetime.fromisoformat(stamped.wall).timestamp()


def _offset(stamped: Line | FaultLine) -> float:
    """What to add to this machine's monotonic clock to get wall time."""
    return _wall(stamped) - stamped.mono
