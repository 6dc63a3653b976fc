"""Marks on the time line of a recovery: one INFO line each, `mark <what> t=<monotonic s> rank=… key=value …`."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("flashrec.runtime")
_MOVING_INTERVAL_S = 2.0


class Timeline:
    """Writes marks of one rank; `t` is CLOCK_MONOTONIC in seconds, comparable between processes of one node."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def mark(self, what: str, **fields: object) -> None:
        if logger.isEnabledFor(logging.INFO):
            rest = "".join(f" {key}={_text(value)}" for key, value in fields.items())
            logger.info("mark %s t=%.6f rank=%d%s", what, time.monotonic(), self._rank, rest)


class Watch:
    """Milliseconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def ms(self) -> float:
        return (time.monotonic() - self._start) * 1e3


class Moving:
    """Marks how far a long transfer is, now and then."""

    def __init__(self, what: str, timeline: Timeline) -> None:
        self._what, self._timeline, self._watch, self._last_ms = what, timeline, Watch(), 0.0

    def __call__(self, num_bytes: int) -> None:
        ms = self._watch.ms()
        if ms - self._last_ms >= _MOVING_INTERVAL_S * 1e3:
            self._last_ms = ms
            self._timeline.mark(self._what, bytes=num_bytes, ms=ms)


def _text(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text else text
