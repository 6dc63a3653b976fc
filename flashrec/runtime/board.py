"""What the manager has published, for the threads of this worker to wait on. No I/O.

The generation check of the worker is here, once, in `deliver`: what belongs to an older generation than the newest
announced is dropped. A thread waits *for a generation*: a newer one raises `Superseded` in it.

A fence at a step boundary is only noted: it counts as announced when this rank is at the boundary (`await_boundary`),
or when it waits for a plan, which a successor does that has no part in the training yet.

A worker of the first launch has nothing that could be recovered before it is resumed for the first time; the manager
then restarts everybody. Until then a fence marks it `doomed` and wakes nobody: it waits for its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from flashrec.core.types import Plan
from flashrec.runtime.errors import Superseded, TrainingComplete, WaitedTooLong
from flashrec.wire import messages as m

T = TypeVar("T")
Table = dict[str, bytes]


class Board:
    """Shared state under one condition variable."""

    def __init__(self, generation: int, is_joiner: bool) -> None:
        self._changed = threading.Condition()
        self.announced = generation  # the newest one that was announced to us; a plain attribute, read in each step
        self._boundary = self._cut = generation
        self._started = is_joiner
        self._doomed = False
        self._complete = False
        self._plan: Plan | None = None
        self._resumed = -1
        self._tables: dict[tuple[int, str], Table] = {}
        self._counters: dict[int, int] = {}
        self._permits: dict[int, m.CommitAnswered] = {}

    @property
    def wants_pause(self) -> bool:
        """True: all ranks are to pause at the end of a step; our next vote says so."""
        return self._boundary > self.announced

    def was_cut(self, generation: int) -> bool:
        """True: the connections of what came before `generation` were ended by its fence, or by a newer one's."""
        return self._cut >= generation

    @property
    def doomed(self) -> bool:
        """True: fenced before the first step, so the manager is about to restart this worker."""
        return self._doomed

    @property
    def is_started(self) -> bool:
        """True once this worker has a state that is worth recovering."""
        return self._started

    @property
    def complete(self) -> bool:
        """True: some rank has passed the final vote."""
        return self._complete

    def deliver(self, message: m.ToWorker) -> bool:
        """Take a message of the agent. Returns True when it is a fence that must now be acted upon."""
        with self._changed:
            generation = getattr(message, "generation", None)
            if isinstance(message, m.PlanPublished):
                generation = message.plan.generation
            if generation is not None and generation < self.announced:
                return False
            fenced = False
            match message:
                case m.Fence() if message.at_boundary:
                    self._boundary = max(self._boundary, message.generation)
                case m.Fence():
                    fenced = self._announce(message.generation)
                case m.PlanPublished():
                    self._plan = message.plan
                case m.Resume():
                    self._resumed, self._started = message.generation, True
                case m.Complete():
                    self._complete = True
                case m.KeysPushed():
                    self._tables.setdefault((message.generation, message.group), {}).update(message.items)
                case m.CounterValue():
                    self._counters[message.request] = message.value
                case m.CommitAnswered():
                    self._permits[message.request] = message
                case _:
                    return False
            self._changed.notify_all()
            return fenced

    def _announce(self, generation: int) -> bool:
        if generation <= self.announced:
            return False
        if not self._started:
            self._doomed = True
            return False
        self.announced = self._cut = generation
        return True

    def await_boundary(self, generation: int, timeout_s: float) -> None:
        """A vote in `generation` said that all pause now: the fence that wants it may still be on its way to us. A
        cutting one counts as well. Raises WaitedTooLong."""

        def ready() -> bool | None:
            self.announced = max(self.announced, self._boundary)
            return True if self.announced > generation or self._complete else None

        with self._changed:
            if not self._changed.wait_for(ready, timeout_s):
                raise WaitedTooLong(f"all ranks pause after a step of generation {generation}, but no fence has come")

    def post(self, generation: int, group: str, key: str, value: bytes) -> None:
        """Put a key of our own where our threads look for keys."""
        with self._changed:
            self._tables.setdefault((generation, group), {})[key] = value
            self._changed.notify_all()

    def wake(self) -> None:
        """Let waiters look again: something outside of the board has changed."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, ready: Callable[[], T | None], generation: int, timeout_s: float, what: str) -> T:
        """Wait until `ready()`, called under the lock, returns something else than None.

        Raises Superseded when a generation newer than `generation` is announced, WaitedTooLong after `timeout_s`.
        """
        found: list[T] = []

        def look() -> bool:
            if self.announced > generation:
                raise Superseded(f"generation {generation} is superseded by {self.announced}")
            value = ready()
            if value is not None:
                found.append(value)
            return value is not None

        with self._changed:
            if not self._changed.wait_for(look, timeout_s):
                raise WaitedTooLong(
                    f"waited {timeout_s:g} s for {what} of generation {generation}; "
                    "see the log of `flashrec run` for what the manager is waiting for"
                )
        return found[0]

    def wait_plan(self, generation: int, timeout_s: float) -> Plan:
        """The plan of `generation`. Raises TrainingComplete, Superseded, WaitedTooLong."""

        def ready() -> Plan | None:
            if self._complete:
                raise TrainingComplete
            if self._plan is not None and self._plan.generation == generation:
                return self._plan
            if self._boundary > generation:
                self.announced = self._boundary
                raise Superseded(f"generation {generation} is superseded by {self.announced}")
            return None

        return self.wait(ready, generation, timeout_s, "the plan")

    def wait_resume(self, generation: int, timeout_s: float) -> None:
        """Return when the step loop may go on in `generation`. Raises TrainingComplete, Superseded, WaitedTooLong."""

        def ready() -> bool | None:
            if self._complete:
                raise TrainingComplete
            return True if self._resumed >= generation else None

        self.wait(ready, generation, timeout_s, "the resume")

    def wait_fence(self, generation: int, timeout_s: float) -> bool:
        """True as soon as a generation newer than `generation` is announced or training is complete; False: never."""
        with self._changed:
            return self._changed.wait_for(lambda: self.announced > generation or self._complete, timeout_s)

    def wait_doom(self, timeout_s: float) -> bool:
        """True as soon as this worker is known to be restarted by the manager."""
        with self._changed:
            return self._changed.wait_for(lambda: self._doomed, timeout_s)

    def wait_for_ever(self, timeout_s: float) -> None:
        """Wait for the end of this process, but not longer than `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: False, timeout_s)

    def wait_keys(self, generation: int, group: str, keys: list[str], timeout_s: float) -> list[bytes]:
        """Values of all `keys` of `group`. Raises Superseded, WaitedTooLong."""

        def ready() -> list[bytes] | None:
            table = self._tables.get((generation, group), {})
            return [table[key] for key in keys] if all(key in table for key in keys) else None

        return self.wait(ready, generation, timeout_s, f"the keys {keys} of group {group}")

    def has_keys(self, generation: int, group: str, keys: list[str]) -> bool:
        with self._changed:
            table = self._tables.get((generation, group), {})
            return all(key in table for key in keys)

    def wait_counter(self, request: int, generation: int, timeout_s: float) -> int:
        value = self.wait(lambda: self._counters.get(request), generation, timeout_s, "a counter")
        with self._changed:
            del self._counters[request]
        return value

    def wait_permit(self, request: int, generation: int, timeout_s: float) -> m.CommitAnswered:
        """The answer to a CommitAsked. Raises Superseded, WaitedTooLong."""
        return self.wait(lambda: self._permits.pop(request, None), generation, timeout_s, "a permission to commit")

    def tables(self) -> Iterator[tuple[int, str, Table]]:
        """A copy of all tables: (generation, group, keys)."""
        with self._changed:
            copy = [(generation, group, dict(table)) for (generation, group), table in self._tables.items()]
        return iter(copy)

    def forget_before(self, generation: int) -> None:
        """Drop the tables of generations older than `generation`."""
        with self._changed:
            for key in [key for key in self._tables if key[0] < generation]:
                del self._tables[key]
