"""`session.on_commit`: what is to happen once for each step that counts.

A step counts on this rank when its position has moved beyond it: after a step in order, a roll forward, or a recovery
that went on. Each callback is taken off the list before it is called, so that an exception, which is the script's,
does not bring it back. What a process has not called when it dies is not called by its next life, which begins with
the step at which training goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Callback = Callable[[int], object]


class Callbacks:
    """The callbacks of one session and which steps they have been called for."""

    def __init__(self) -> None:
        self._callbacks: list[Callback] = []
        self.due: deque[tuple[Callback, int]] = deque()
        self._next = 0

    def add(self, callback: Callback) -> None:
        """Call it for the steps that count from now on. Raises TypeError."""
        if not callable(callback):
            raise TypeError(f"session.on_commit(callback): {type(callback).__name__} cannot be called")
        self._callbacks.append(callback)

    def begin(self, position: int) -> None:
        """Training begins, or goes on, at step `position`."""
        self._next = position

    def run(self, position: int) -> None:
        """All steps before `position` count. Raises what a callback raises; those behind it are called next time."""
        if self._callbacks:
            self.due.extend((each, step) for step in range(self._next, position) for each in self._callbacks)
        self._next = max(self._next, position)
        while self.due:
            callback, step = self.due.popleft()
            callback(step)
