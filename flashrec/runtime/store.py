"""Rendezvous over the control plane: a c10d store whose keys are pushed to those who need them.

One `TableStore` is one group in one generation. `set` is one message; reads wait for what the manager pushes. There is
no server on a training node, nothing polls, and a newer generation wakes every waiter with `Superseded`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from flashrec.core.ranks import compact
from flashrec.runtime.board import Board
from flashrec.runtime.torch_private import groups as private
from flashrec.wire import messages as m

Send = Callable[[m.ToAgentFromWorker], None]
_requests = itertools.count(1)


class TableStore(private.Store):
    """c10d store of `group` in `generation`; `members` are the ranks that shall see our keys."""

    def __init__(
        self,
        board: Board,
        send: Send,
        rank: int,
        incarnation: int,
        generation: int,
        group: str,
        members: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._board, self._send = board, send
        self._rank, self._incarnation = rank, incarnation
        self._generation, self._group, self._members = generation, group, compact(members)
        self._timeout_s = timeout_s

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._board.post(self._generation, self._group, key, data)
        self._send(
            m.KeyPosted(
                rank=self._rank,
                incarnation=self._incarnation,
                generation=self._generation,
                group=self._group,
                key=key,
                value=data,
                members=self._members,
            )
        )

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._board.wait_keys(self._generation, self._group, list(keys), self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # The caller's time-out (gloo: that of one connection) is not ours: ranks may start minutes apart, and a dead
        # one is announced by a fence, which wakes us.
        self.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        return self._board.has_keys(self._generation, self._group, list(keys))

    def add(self, key: str, amount: int) -> int:
        request = next(_requests)
        self._send(
            m.CounterAdded(
                rank=self._rank,
                incarnation=self._incarnation,
                generation=self._generation,
                group=self._group,
                key=key,
                amount=amount,
                request=request,
            )
        )
        return self._board.wait_counter(request, self._generation, self._timeout_s)

    def delete_key(self, key: str) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: see `wait`."""

    def has_extended_api(self) -> bool:
        return False
