"""`session.quiet("eval")`: this rank may stand still for a while, and whoever waits for it waits with reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flashrec.runtime.worker import Worker

MAX_REASON = 80


@contextmanager
def quiet(worker: Worker | None, reason: str) -> Iterator[None]:
    """Say so at once at both ends: what is in between may keep the heartbeat thread from running. May be nested.

    worker None: not under `flashrec run`, so nobody is to be told. Raises ValueError without a reason.
    """
    if not reason.strip():
        raise ValueError('session.quiet(reason): say why, for example session.quiet("checkpoint")')
    if worker is None:
        yield
        return
    before = worker.progress.quiet
    _say(worker, reason.strip()[:MAX_REASON])
    try:
        yield
    finally:
        _say(worker, before)


def _say(worker: Worker, reason: str) -> None:
    worker.progress.quiet = reason
    worker.control.beat()
