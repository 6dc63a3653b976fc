"""Last words: an uncaught exception and an orderly end are told to the agent before the process goes.

The fingerprint makes two occurrences of one bug equal although addresses, ranks and numbers in the text differ: it is
the exception's type, its text without them, and the file:line of the last frames.
"""

from __future__ import annotations

import atexit
import gc
import re
import sys
import threading
import traceback
from types import TracebackType

from flashrec.core import events
from flashrec.core.types import Raised
from flashrec.runtime import stuck
from flashrec.runtime.errors import is_communication
from flashrec.runtime.inplace import DISPOSE_THREAD
from flashrec.runtime.timeline import logger
from flashrec.runtime.worker import Worker

_NUM_FRAMES = 3
_MAX_TRACEBACK_CHARS = 20_000
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)*(e[+-]?\d+)?")
_DOOM_TIMEOUT_S = 120.0
_DISPOSE_TIMEOUT_S = 5.0
_IDLE_TIMEOUT_S = 1.0


def fingerprint(error: BaseException) -> str:
    """A text that is equal for two occurrences of the same bug."""
    text = _VARIABLE.sub("#", str(error)).strip()[:200]
    frames = traceback.extract_tb(error.__traceback__)[-_NUM_FRAMES:]
    where = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {text} @ {where}"


def install(worker: Worker) -> None:
    """Wrap sys.excepthook and register the farewell."""
    inner = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not worker.control.is_forked():
            _wait_for_doom(worker, error)
            if not issubclass(kind, KeyboardInterrupt):
                text = "".join(traceback.format_exception(kind, error, trace))[-_MAX_TRACEBACK_CHARS:]
                worker.control.send(
                    events.WorkerRaised(
                        rank=worker.rank,
                        incarnation=worker.env.incarnation,
                        raised=Raised(step=worker.progress.v, fingerprint=fingerprint(error), traceback=text),
                    )
                )
        inner(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_say_farewell, worker)


def _say_farewell(worker: Worker) -> None:
    """And end gloo's threads while the interpreter is whole: one that lets go of its last tensor during finalization
    ends the process with SIGABRT (pytorch issue 38228). Model and session refer to each other, so they hold the groups
    until they are collected, although the script has destroyed them; and a recovery just before the end may still be
    disposing of the groups of the generation before. A reducer of DDP that is collected while a thread of gloo waits
    for the interpreter's lock would wait for that thread for ever."""
    if not worker.control.is_forked():
        worker.control.say_farewell()
        stuck.await_idle(_IDLE_TIMEOUT_S)
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == DISPOSE_THREAD:
                thread.join(_DISPOSE_TIMEOUT_S)


def _wait_for_doom(worker: Worker, error: BaseException) -> None:
    """A collective that fails before the first step: a peer died, and the manager restarts everybody. Not our error."""
    if worker.board.is_started or not is_communication(error):
        return
    if worker.board.wait_doom(worker.limits.fence_timeout_s):
        logger.info("a peer was lost before the first step; waiting to be restarted")
        worker.board.wait_for_ever(_DOOM_TIMEOUT_S)
