"""What a check says: one finding per thing looked at, each with what was seen and what to do about it.

`UNKNOWN` is a verdict of its own: it was not possible to look, and `what` says why. It is never counted as fine.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but not as well as it could: the text says what is lost
    FAIL = "fail"  # something that was asked for does not work
    UNKNOWN = "unknown"  # could not look


class Finding(msgspec.Struct, frozen=True):
    """check: a stable name ('plugin.loaded'), for programs; node: '' for the cluster and the machine we are on."""

    check: str
    status: Status
    what: str
    do: str = ""
    node: str = ""


def ok(check: str, what: str) -> Finding:
    return Finding(check, Status.OK, what)


def warn(check: str, what: str, do: str) -> Finding:
    return Finding(check, Status.WARN, what, do)


def fail(check: str, what: str, do: str) -> Finding:
    return Finding(check, Status.FAIL, what, do)


def unknown(check: str, what: str, do: str = "") -> Finding:
    return Finding(check, Status.UNKNOWN, what, do)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if anything fails, else 0. What could not be looked at is shown and counted, not failed."""
    return int(any(finding.status is Status.FAIL for finding in findings))
