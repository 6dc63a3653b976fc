"""What this node remembers from one run of the health program to the next, in a small file.

Losing it is harmless: then Slurm is asked once whether this node is ours to undrain.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from flashrec.health import Report, Status


class State(msgspec.Struct, frozen=True):
    """fails, oks: runs in a row, up to now. culprits: labels of the checks that failed since the node was last fine.
    may_be_drained: whether Slurm has to be asked if this node bears our reason. must_recount: we drained and could not
    look yet whether we were one too many. summary: of the last run, for people."""

    fails: int = 0
    oks: int = 0
    culprits: tuple[str, ...] = ()
    may_be_drained: bool = True
    must_recount: bool = False
    checked_at: float = 0.0
    summary: str = ""


def advance(state: State, report: Report, now: float) -> State:
    """Count this run. It is good only if every check that had failed now says that all is well: one that could not
    look has not mended anything. If it is not known which failed, all have to be well."""
    failed = tuple(finding.label for finding in report.with_status(Status.FAIL))
    unknown = {finding.label for finding in report.with_status(Status.UNKNOWN)}
    culprits = tuple(dict.fromkeys((*state.culprits, *failed)))
    doubtful = unknown & set(culprits) if culprits else unknown
    state = msgspec.structs.replace(state, culprits=culprits, checked_at=now, summary=summary(report))
    if failed:
        return msgspec.structs.replace(state, fails=state.fails + 1, oks=0)
    if doubtful:
        return msgspec.structs.replace(state, oks=0)
    return msgspec.structs.replace(state, fails=0, oks=state.oks + 1, culprits=culprits if state.may_be_drained else ())


def summary(report: Report) -> str:
    """'fail: disk: … ; unknown: clock: …', the worst first; 'ok' if there is nothing to say."""
    parts = [
        f"{status}: {finding.verdict.check}: {finding.verdict.reason}"
        for status in (Status.FAIL, Status.UNKNOWN, Status.WARN)
        for finding in report.with_status(status)
    ]
    return "; ".join(parts) or f"ok ({len(report.findings)} checks)"


def read(path: Path) -> State:
    """A new State if there is none, or one that cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        return State()


def write(path: Path, state: State) -> None:
    """Whole or not at all. Raises OSError."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
    os.replace(beside, path)


class OnlyOne:
    """Held while the program runs; a second one finds `is_held` false. The kernel ends it with the process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_held = True
        except BlockingIOError:
            self.is_held = False

    def close(self) -> None:
        os.close(self._fd)
