"""What all workers of a node say at nearly the same time goes to the manager in one message.

In a recovery every worker reports, has formed its groups, is restored, and does a step. The manager has to take that
from all ranks of the job at once, and a message costs it more than what is in it. So the first such word waits for
those of the other workers, at most `DELAY_S`. Anything else goes at once, behind what waits: the order stays.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from flashrec.core import events
from flashrec.wire import messages as m

DELAY_S = 0.002
_OF_ALL = (
    events.WorkerJoined, events.WorkerReported, events.WorkerFormed, events.WorkerRestored, events.WorkerCommitted,
    m.KeyPosted,
)  # fmt: skip


class Bundle:
    """send takes what goes to the manager; num_workers: how many may be expected to say the same."""

    def __init__(self, send: Callable[[m.Sendable], None], num_workers: Callable[[], int]) -> None:
        self._send, self._num_workers = send, num_workers
        self._waiting: list[m.FromWorkers] = []
        self._said: Counter[type] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def relay(self, message: m.Sendable) -> None:
        if not isinstance(message, _OF_ALL):
            self.flush()
            self._send(message)
            return
        self._waiting.append(message)
        self._said[type(message)] += 1
        if self._said[type(message)] >= self._num_workers():
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self.flush)

    def flush(self) -> None:
        """Send what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        self._said.clear()
        if waiting:
            self._send(waiting[0] if len(waiting) == 1 else m.Relayed(tuple(waiting)))
