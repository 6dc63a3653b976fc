"""What the recovery machine of one job remembers, and the small moves that all of it is made of.

`core.phases` has what leads from one phase to the next. The table `TRANSITIONS` is checked at every move and drawn in
docs/concepts/recovery.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from flashrec.core import effects, endings, ladder
from flashrec.core.effects import AnyEffect
from flashrec.core.endings import EXIT_BUG
from flashrec.core.last_words import LastWords
from flashrec.core.limits import Limits, PoolLimits
from flashrec.core.membership import Members, Slot
from flashrec.core.pool import PoolTier
from flashrec.core.resize import Resize
from flashrec.core.room import RoomSearch
from flashrec.core.swap import PlannedSwap
from flashrec.core.types import Phase, Plan
from flashrec.core.unanimous import Unanimous

_ALWAYS = frozenset({Phase.FENCING, Phase.PLACING, Phase.STOPPED})  # a failure (before the first step: a new start)
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.RUNNING: _ALWAYS,
    Phase.FENCING: _ALWAYS,
    Phase.PLACING: _ALWAYS | {Phase.FORMING, Phase.SAVING, Phase.RESIZING},
    Phase.FORMING: _ALWAYS | {Phase.RESTORING},
    Phase.RESTORING: _ALWAYS | {Phase.RUNNING},
    Phase.SAVING: _ALWAYS,
    Phase.RESIZING: _ALWAYS,
    Phase.STOPPED: frozenset(),
}
# What every rank has to have done before a phase is left.
AWAITED: dict[Phase, tuple[str, Callable[[Slot], object]]] = {
    Phase.FENCING: ("fenced", lambda slot: slot.report or not slot.is_survivor),
    Phase.PLACING: ("placed", lambda slot: slot.report and slot.is_live),
    Phase.FORMING: ("formed", lambda slot: slot.formed),
    Phase.RESTORING: ("restored", lambda slot: slot.restored_v is not None),
}


class JobState:
    """State of one job."""

    def __init__(self, limits: Limits | None = None, pool: PoolLimits | None = None) -> None:
        self.limits = limits or Limits()
        self._room = RoomSearch(PoolTier(pool or PoolLimits()))
        self.phase = Phase.PLACING
        self._awaited: tuple[str, Callable[[Slot], object]] | None = None  # of AWAITED, once the job has begun
        self.generation = 1
        self.members = Members((), 0, 0)
        self.plan: Plan | None = None
        self.exit_code: int | None = None
        self.stop_reason = ""
        self._swap = PlannedSwap()
        self._resize = Resize()
        self._resumed = 0  # the generation that trains
        self._trained = False  # some generation has resumed since the last start from scratch
        self._deadline: float | None = None
        self._without_progress = 0
        self._is_supervised = False  # some worker has called flashrec.init()
        self._last_words = LastWords()
        self._kept = ladder.Kept()
        self._homeless: endings.Ending | None = None  # how the job ends unless its survivors can write a checkpoint
        self._has_launched = False  # in this recovery
        self._has_left = False  # some worker has ended in good order
        self._asked = defaultdict[str, Unanimous](Unanimous)
        self._all_put_aside = Unanimous()
        self._active = Unanimous()  # the first nodes, whose agents the first start waits for
        self._out: list[AnyEffect] = []

    @property
    def pool(self) -> PoolTier:
        """What was asked of the pool, and what it said."""
        return self._room.pool

    @property
    def num_loads(self) -> int:
        """How often all ranks have gone back to a checkpoint."""
        return self._kept.total_loads

    @property
    def training(self) -> int:
        """The generation whose ranks may act. While all are to pause at a step boundary it is still the former one."""
        acts = self.phase is Phase.RUNNING or (self._swap.pausing and self.phase is Phase.FENCING)
        return self._resumed if acts else self.generation

    def _all(self, what: str, condition: Callable[[Slot], object]) -> bool:
        """`condition`, which is called `what`, holds for all acting lives."""
        return self._asked[what].is_met(self.members.slots, condition)

    def _begin_generation(self) -> None:
        self.generation += 1
        self.plan = self._homeless = None
        self._resize.grows = False
        self._room.forget()
        for life in self.members.lives():
            life.forget_generation()

    def _drop(self, lives: list[Slot], reason: str) -> None:
        """Lives that are not needed: kill them and forget the successors among them."""
        self._kill(lives, reason)
        for life in lives:
            life.state = "unplaced"
            slot = self.members.slots[life.rank]
            if slot.successor is life:
                slot.successor = None

    def _is_stuck(self, reason: str) -> bool:
        """Failures in a row without one new optimizer step: the next one, or a requeue, would only repeat them."""
        self._without_progress += 1
        if self._without_progress <= self.limits.max_without_progress:
            return False
        self._stop(
            f"{self._without_progress} failures in a row without one new step; the last one: {reason}",
            EXIT_BUG,
        )
        return True

    def _move(self, after: Phase, reason: str) -> None:
        if after not in TRANSITIONS[self.phase]:
            raise AssertionError(f"no transition {self.phase} -> {after} ({reason})")
        self._out.append(effects.ChangePhase(self.phase, after, self.generation, reason))
        self.phase, self._awaited = after, AWAITED.get(after)

    def _kill(self, slots: list[Slot], reason: str) -> None:
        by_node: dict[str, list[tuple[int, int]]] = {}
        for slot in slots:
            if slot.is_live:
                by_node.setdefault(slot.node, []).append((slot.rank, slot.incarnation))
        for node, workers in by_node.items():
            self._out.append(effects.KillWorkers(node, tuple(workers), reason))

    def _stop(self, reason: str, exit_code: int) -> None:
        self.exit_code, self.stop_reason = exit_code, reason
        self._move(Phase.STOPPED, reason.splitlines()[0])
        self._deadline = None
        self._out.append(effects.StopJob(reason, exit_code))
