"""The phases of a recovery, and how the machine gets from one to the next.

    RUNNING ─► FENCING ─► PLACING ─► FORMING ─► RESTORING ─► RUNNING          (STOPPED from anywhere)

    phase      left when                                        asked on the way in
    FENCING    every survivor has reported for this generation  fence, kill what is lost, launch its next life
    PLACING    every rank has a worker that has reported        (first start: agents join, all ranks are launched)
    FORMING    every rank has formed its groups                 plan
    RESTORING  every rank holds the state of the resume step    -
    RUNNING    something is lost, or all pause for a swap       resume

A failure in any phase raises the generation and goes back to FENCING. Before the first resume nothing is worth
keeping, so then everybody is started anew. A planned swap (`core.swap`) goes through the same phases once all ranks
have paused at a step boundary; until then it is RUNNING that goes on. The table `TRANSITIONS` is checked at every move
and drawn in docs/concepts/recovery.md.
"""

from __future__ import annotations

import msgspec

from flashrec.core import commit, effects, endings
from flashrec.core.effects import AnyEffect
from flashrec.core.endings import EXIT_BUG, EXIT_REQUEUE
from flashrec.core.last_words import LastWords
from flashrec.core.limits import Limits, PoolLimits
from flashrec.core.membership import Members, Slot
from flashrec.core.pool import PoolTier
from flashrec.core.room import RoomSearch
from flashrec.core.swap import PlannedSwap
from flashrec.core.types import Phase, Plan

_ALWAYS = frozenset({Phase.FENCING, Phase.PLACING, Phase.STOPPED})  # a failure (before the first step: a new start)
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.RUNNING: _ALWAYS,
    Phase.FENCING: _ALWAYS,
    Phase.PLACING: _ALWAYS | {Phase.FORMING},
    Phase.FORMING: _ALWAYS | {Phase.RESTORING},
    Phase.RESTORING: _ALWAYS | {Phase.RUNNING},
    Phase.STOPPED: frozenset(),
}


class Phases:
    """State of one job. `core.machine` adds what each event means for it."""

    def __init__(self, limits: Limits | None = None, pool: PoolLimits | None = None) -> None:
        self.limits = limits or Limits()
        self._room = RoomSearch(PoolTier(pool or PoolLimits()))
        self.phase = Phase.PLACING
        self.generation = 1
        self.members = Members((), 0, 0)
        self.plan: Plan | None = None
        self.exit_code: int | None = None
        self.stop_reason = ""
        self._swap = PlannedSwap()
        self._resumed = 0  # the generation that trains
        self._trained = False  # some generation has resumed since the last start from scratch
        self._deadline: float | None = None
        self._without_progress = 0
        self._is_supervised = False  # some worker has called flashrec.init()
        self._last_words = LastWords()
        self._out: list[AnyEffect] = []

    @property
    def pool(self) -> PoolTier:
        """What was asked of the pool, and what it said."""
        return self._room.pool

    @property
    def training(self) -> int:
        """The generation whose ranks may act. While all are to pause at a step boundary it is still the former one."""
        acts = self.phase is Phase.RUNNING or (self._swap.pausing and self.phase is Phase.FENCING)
        return self._resumed if acts else self.generation

    # ---- failure ----------------------------------------------------------------------------------------------

    def _lose(self, slots: list[Slot], reason: str, now: float) -> None:
        """These workers are no more (or must be no more). Fence, and give them a next life."""
        lost = [slot for slot in slots if slot.state != "unplaced"]
        if not lost:
            return  # a spare without ranks: nothing to recover
        self._kill(lost, reason)
        for slot in lost:
            slot.state, slot.lost_because = "unplaced", reason
        missed = [slot for slot in lost if not self._can_spare(slot)]
        if not missed:
            self._advance(now)
            return
        counts = self.phase is Phase.RUNNING or any(slot.joins for slot in missed)
        self._regroup(reason)
        if self.members.is_complete:
            self._complete()
            return
        early = [slot.rank for slot in self.members.slots if slot.state == "gone"]
        if early and self._trained:
            self._stop(*endings.left_early(early[0], f"before this failure: {reason}"))
            return
        if self._trained and not any(slot.is_survivor for slot in self.members.slots):
            self._stop(*endings.nothing_left(reason, self._last_words))
            return
        if self._trained:
            self._fence(reason, now, counts)
        else:
            self._start_anew(reason, now)

    def _can_spare(self, lost: Slot) -> bool:
        """Training goes on without it: a successor that does not act yet, a predecessor that is no source."""
        slot = self.members.slots[lost.rank]
        if lost is slot:
            return False
        if lost is slot.successor:
            slot.successor = None
            return True
        slot.predecessor = None
        is_source = self.plan is not None and self.plan.sources.get(slot.rank) == slot.rank
        return not is_source or slot.restored_v is not None

    def _regroup(self, reason: str) -> None:
        """A failure: where a predecessor stands by it acts again, and a successor acts for a rank that has nobody."""
        if self._swap.pausing:
            self._out += self._swap.cut(self.members)
        taken_back = [slot for slot in self.members.slots if slot.predecessor is not None]
        self._drop(taken_back, f"the swap was cut: {reason}")
        for slot in list(self.members.slots):
            if slot in taken_back:
                self.members.take_back(slot)
            elif slot.state == "unplaced" and slot.successor is not None:
                self._last_words.forget(slot.rank)
                self.members.hand_over(slot)

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

    def _fence(self, reason: str, now: float, counts: bool = True) -> None:
        """counts: a failure of its own; not so when more survivors of the same moment are found dead."""
        if counts and self._is_stuck(reason):
            return
        self._regroup(reason)
        self._begin_generation()
        self._move(Phase.FENCING, reason)
        self._deadline = now + self.limits.fence_timeout_s
        self._out.append(effects.AnnounceFence(self.generation, reason))
        if not self._room.fits(self.members, self.limits):
            self._drop(self.members.successors(), "its place is needed for a rank that was lost")
        self._launch_unplaced(reason, now)
        self._advance(now)

    def _begin_generation(self) -> None:
        self.generation += 1
        self.plan = None
        self._room.forget()
        for life in self.members.lives():
            life.forget_generation()

    def _start_anew(self, reason: str, now: float) -> None:
        """Nothing has been trained yet: kill everybody and start all ranks again, in a new generation."""
        if self._is_stuck(reason):
            return
        self._kill([slot for slot in self.members.slots if slot.is_live], "start from scratch")
        self._begin_generation()
        for slot in self.members.slots:
            slot.state = "unplaced"
        self._move(Phase.PLACING, f"{reason}; nothing trained yet, all ranks start anew")
        self._out.append(effects.AnnounceFence(self.generation, reason))
        self._launch_unplaced(reason, now)

    def _launch_unplaced(self, reason: str, now: float) -> None:
        """Ask for a next life of every rank without a worker, or wait for room."""
        waiting = self.members.unplaced()
        if not waiting or self.members.is_complete:
            return
        placed, asked = self._room.find(self.members, self.limits, reason, now)
        self._out += asked
        if placed is None:
            self._deadline = self._room.waits_until
            return
        for slot in waiting:
            self._last_words.forget(slot.rank)
        placement = {node: self.members.assign(node, ranks, self.generation, self._trained)
                     for node, ranks in placed.items()}  # fmt: skip
        self._out.append(effects.LaunchWorkers(placement, reason))
        if not self._trained:
            self._last_words.attempt = self.generation
            self._move(Phase.FORMING, "all ranks launched")
            self._deadline = now + self.limits.launch_timeout_s
        elif self.phase is Phase.PLACING:
            self._deadline = now + self.limits.launch_timeout_s
        elif self.phase is Phase.FENCING:
            self._deadline = now + self.limits.fence_timeout_s

    def _search_again(self, reason: str, now: float) -> None:
        """Something changed for ranks that wait for a node. (At the first start they wait for all active nodes.)"""
        if self._room.deadline is not None or any(slot.incarnation for slot in self.members.slots):
            self._launch_unplaced(reason, now)

    # ---- planned swap -----------------------------------------------------------------------------------------

    def _go_on_with_swap(self, now: float) -> None:
        """While training goes on: start successors, and once all are ready let everybody pause at a step boundary."""
        if self.phase is not Phase.RUNNING or self.members.is_complete or self._swap.pausing:
            return
        if not all(slot.is_live for slot in self.members.slots):
            return  # a script that ends early: nobody can be restored from then on
        self._drop(self._swap.unwanted(self.members), "its predecessor stays")
        self._out += self._swap.seek(self.members, self.pool, self.limits, self.generation, now)
        if not self._swap.wants_room:
            self._out += self.pool.give_back_idle(self.members)
        self._out += self._swap.retire(self.members)
        if self._swap.is_ready(self.members):
            self._swap.begin(self.members)
            self._begin_generation()
            self._out.append(effects.AnnounceFence(self.generation, self._swap.why, at_boundary=True))

    # ---- progress ---------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Leave the current phase if its condition holds; may leave several."""
        slots = self.members.slots
        if self.members.is_complete:
            return  # whoever is left goes its own way to the end
        if self.phase is Phase.FENCING and all(s.report for s in slots if s.is_survivor):
            self._move(Phase.PLACING, "all ranks have paused" if self._swap.pausing else "all survivors are fenced")
            self._deadline = self._room.waits_until or now + self.limits.launch_timeout_s
        waits = self._swap.pausing and not all(s.report for s in self.members.successors())
        if self.phase is Phase.PLACING and self._trained and not waits and all(s.report and s.is_live for s in slots):
            self._decide(now)
        if self.phase is Phase.FORMING and all(s.formed for s in slots):
            self._move(Phase.RESTORING, "all groups are formed")
            self._deadline = now + self.limits.restore_timeout_s
        if self.phase is Phase.RESTORING and all(s.restored_v is not None for s in slots):
            self._resume()

    def _decide(self, now: float) -> None:
        moving = [slot for slot in self.members.slots if slot.successor is not None and self._swap.pausing]
        former = {slot.rank: slot.report for slot in moving if slot.report is not None}
        for slot in moving:
            self.members.hand_over(slot)
        reports = {slot.rank: slot.report for slot in self.members.slots if slot.report is not None}
        verdict = commit.decide(self.generation, reports, former)
        if isinstance(verdict, commit.Impossible):
            if len(verdict.ranks) == self.members.world_size:
                self._stop(*endings.nothing_left("the last state was lost", self._last_words))
                return
            self._stop(f"cannot restore rank {', '.join(map(str, verdict.ranks))}: {verdict.reason}", EXIT_REQUEUE)
            return
        taken_over = {slot.rank: self.members.slots[slot.rank].incarnation for slot in moving}
        self.plan = verdict = msgspec.structs.replace(verdict, successors=taken_over, at_boundary=self._swap.pausing)
        self._move(Phase.FORMING, verdict.reason)
        self._deadline = now + self.limits.form_timeout_s
        self._out.append(effects.PublishPlan(verdict))

    def _resume(self) -> None:
        at = {slot.restored_v for slot in self.members.slots}
        self._move(Phase.RUNNING, f"all ranks are ready at step {', '.join(map(str, sorted(at, key=str)))}")
        self._deadline, self._trained, self._last_words.attempt = None, True, self.generation
        self._resumed, self._swap.pausing = self.generation, False
        self._kill([s.predecessor for s in self.members.slots if s.predecessor], "its successor has taken over")
        for slot in self.members.slots:
            slot.predecessor = None
        self._out.append(effects.AnnounceResume(self.generation))

    def _complete(self) -> None:
        """A rank has passed the final vote, so every rank has done all steps: nobody is restored any more."""
        self._deadline = None
        self._room.forget()
        self._regroup("all steps are done")
        self._drop(self.members.successors(), "all steps are done: nobody is restored any more")
        self._out += self.pool.settle("all steps are done")
        joiners = [slot for slot in self.members.slots if slot.is_live and slot.joins]
        self._kill(joiners, "all steps are done: nobody is restored any more")
        for slot in joiners:
            slot.state = "unplaced"
        self._out.append(effects.AnnounceComplete(self.generation))
        self._stop_if_over()

    def _stop_if_over(self) -> None:
        if not self.members.live():
            self._stop(*endings.all_gone(self.members, self._last_words))

    def _timed_out(self, now: float) -> None:
        slots, limits = self.members.slots, self.limits
        if self.members.unplaced() and self.phase in (Phase.PLACING, Phase.FENCING):
            self._out += self.pool.give_up(self.members, limits.start_timeout_s, now)
            self._launch_unplaced("out of time: whatever node there is", now)
            if self.members.unplaced() and (self._deadline is None or self._deadline <= now):
                self._stop(*endings.no_room(self.members, limits.start_timeout_s, self.pool.said))
        elif self.phase is Phase.FENCING:
            mute = [s for s in slots if s.is_survivor and s.report is None]
            self._lose(mute, f"no report within {limits.fence_timeout_s:g} s of the fence", now)
        elif self._swap.pausing and self.phase is Phase.PLACING:
            mute = [successor for successor in self.members.successors() if successor.report is None]
            self._lose(mute, f"not heard again within {limits.launch_timeout_s:g} s of the pause", now)
        elif self.phase is Phase.PLACING or not self._trained:
            mute = [s for s in slots if s.report is None and s.restored_v is None]
            if not self._is_supervised:
                mute = [s for s in mute if s.state == "launched"]  # a script without flashrec.init() says nothing
                self._deadline = None
            for name in {s.node for s in mute}:
                self.members.nodes[name].launch_failures += 1
            self._lose(mute, f"not ready within {limits.launch_timeout_s:g} s of its launch", now)
        elif self.phase is Phase.FORMING:
            self._fence(f"groups not formed within {limits.form_timeout_s:g} s", now)
        elif self.phase is Phase.RESTORING:
            self._fence(f"not restored within {limits.restore_timeout_s:g} s", now)
        else:
            self._deadline = None

    def _move(self, after: Phase, reason: str) -> None:
        if after not in TRANSITIONS[self.phase]:
            raise AssertionError(f"no transition {self.phase} -> {after} ({reason})")
        self._out.append(effects.ChangePhase(self.phase, after, self.generation, reason))
        self.phase = after

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
