"""What a check says: one line of JSON with exactly these fields.

    {"check": "disk", "status": "fail", "reason": "/scratch is mounted read-only", "facts": {"free_percent": 71.2}}

`unknown` means that the check could not look; it is never the same as `ok`. What is not exactly a verdict is none.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_BYTES = 65536

Fact = bool | int | float | str | None


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


_SEVERITY = (Status.OK, Status.WARN, Status.UNKNOWN, Status.FAIL)


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """reason: one line for people, empty only if all is well. facts: what was measured, for programs."""

    check: str
    status: Status
    reason: Annotated[str, Meta(max_length=500)] = ""
    facts: dict[str, Fact | list[Fact]] = {}

    def __post_init__(self) -> None:
        if self.status is not Status.OK and not self.reason:
            raise ValueError(f"status {self.status} without a reason")
        if not self.reason.isprintable():
            raise ValueError("the reason is not one line of printable text")


def decode_verdict(printed: bytes, check: str) -> Verdict:
    """The verdict of `check` in what it printed. Raises ValueError saying what is wrong with it."""
    if not printed.strip():
        raise ValueError("printed nothing")
    if len(printed) > MAX_BYTES:
        raise ValueError(f"printed more than {MAX_BYTES} bytes")
    try:
        verdict = msgspec.json.decode(printed, type=Verdict)
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise ValueError(f"printed no verdict: {err}") from err
    if verdict.check != check:
        raise ValueError(f"printed a verdict of {verdict.check!r}")
    return verdict


def worst(statuses: list[Status]) -> Status:
    """The status of several checks together; OK of none."""
    return max(statuses, key=_SEVERITY.index, default=Status.OK)
