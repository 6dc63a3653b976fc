"""Asking for permission to put a checkpoint in place: `session.may_commit()`.

The manager answers (`core.permits`). A yes is good for a limited time after the question, so it is believed only while
more than half of that time is left: what the script does next is a rename, not a write.
"""

from __future__ import annotations

import itertools
import time

from flashrec.runtime.errors import Superseded, WaitedTooLong
from flashrec.runtime.quiet import quiet
from flashrec.runtime.timeline import logger
from flashrec.runtime.worker import Worker
from flashrec.wire import messages as m

_requests = itertools.count(1)
NEEDED = 0.5  # share of a permission's time that must be left


def ask(worker: Worker, step: int | None, timeout_s: float) -> bool:
    """True: this rank may commit its checkpoint of `step` (None: the steps done so far) now. False: it may not, or
    nobody has answered within `timeout_s`; the log says which."""
    step = worker.progress.v if step is None else step
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            asked_at = time.monotonic()
            with quiet(worker, "may_commit"):  # the answer may have to wait for a promise to a former life
                answer = _ask_once(worker, step, deadline - asked_at)
            if not answer.granted:
                logger.warning("rank %d may not commit step %d: %s", worker.rank, step, answer.reason)
                return False
            if time.monotonic() - asked_at < answer.valid_s * NEEDED:
                return True  # else the answer took so long that it is hardly good any more: ask again
    except Superseded as err:
        logger.warning("rank %d may not commit step %d: %s", worker.rank, step, err)
    except WaitedTooLong:
        logger.warning("rank %d may not commit step %d: no answer within %g s", worker.rank, step, timeout_s)
    return False


def _ask_once(worker: Worker, step: int, timeout_s: float) -> m.CommitAnswered:
    board, request = worker.board, next(_requests)
    generation = board.announced if board.complete else worker.progress.generation
    worker.control.send(
        m.CommitAsked(
            rank=worker.rank, incarnation=worker.env.incarnation, generation=generation, step=step, request=request
        )
    )
    return board.wait_permit(request, generation, max(0.0, timeout_s))
