"""The phases of a recovery, and how the machine gets from one to the next.

    RUNNING ─► FENCING ─► PLACING ─► FORMING ─► RESTORING ─► RUNNING          (STOPPED from anywhere)

    phase      left when                                        asked on the way in
    FENCING    every survivor has reported for this generation  fence, kill what is lost, launch its next life
    PLACING    every rank has a worker that has reported        (first start: agents join, all ranks are launched)
    FORMING    every rank has formed its groups                 plan
    RESTORING  every rank holds the state of the resume step    -
    RUNNING    something is lost, or all pause for a swap       resume
    SAVING     survivors have written a checkpoint              plan (PLACING has found no node for lost ranks)
    RESIZING   all have put their state aside                   plan (no node for lost ranks, or room for more ranks)

A failure in any phase raises the generation and goes back to FENCING. Before the first resume nothing is worth
keeping, so then everybody is started anew; so it is when too little of the state is left, but a checkpoint is
(`core.ladder`). A planned swap (`core.swap`) goes through the same phases once all ranks
have paused at a step boundary; until then it is RUNNING that goes on. After RESIZING all ranks begin a new life in a
world of another size (`core.resize`): until that has resumed, what was put aside is what is kept.
"""

from __future__ import annotations

import msgspec

from flashrec.core import commit, effects, endings, ladder, resize
from flashrec.core.endings import EXIT_REQUEUE
from flashrec.core.job_state import JobState
from flashrec.core.membership import Estate, Slot
from flashrec.core.types import Phase, Plan, Report


class Phases(JobState):
    """How one job moves. `core.machine` adds what each event means for it."""

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
            self._go_back(reason, endings.nothing_left(reason, self._last_words), now, counts)
            return
        if self._trained:
            self._fence(reason, now, counts)
        else:
            self._start_anew(reason, f"{reason}; nothing trained yet, all ranks start anew", now)

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

    def _start_anew(self, reason: str, because: str, now: float, counts: bool = True) -> None:
        """Nothing that could be kept but what was put aside: kill everybody and start all ranks again, in a new
        generation."""
        if counts and self._is_stuck(reason):
            return
        if self._resize.estate is not None:
            self._begin_world(self._resize.estate, reason, now)
            return
        self._kill([slot for slot in self.members.slots if slot.is_live], "start from scratch")
        self._begin_generation()
        for slot in self.members.slots:
            slot.state = "unplaced"
        self._move(Phase.PLACING, because)
        self._out.append(effects.AnnounceFence(self.generation, reason))
        self._launch_unplaced(reason, now)

    def _go_back(self, reason: str, ending: endings.Ending, now: float, counts: bool) -> None:
        """Too little of the state is left to go on with: all ranks start again from the newest checkpoint, or it is the
        end. If exceptions of the script did it, it is."""
        refusal = self._kept.refusal(self.limits)
        if refusal or ending[1] != EXIT_REQUEUE:
            self._stop(f"{ending[0]}; {refusal}" if ending[1] == EXIT_REQUEUE else ending[0], ending[1])
            return
        rung = ladder.checkpoint(self._kept, reason, self.limits)
        self._out.append(rung)
        self._drop(self.members.successors(), "all ranks start again")
        self._trained, self._resize.estate = False, None
        self._start_anew(reason, rung.reason, now, counts)

    def _launch_unplaced(self, reason: str, now: float) -> None:
        """Ask for a next life of every rank without a worker, or wait for room."""
        waiting = self.members.unplaced()
        if not waiting or self.members.is_complete or self.phase is Phase.SAVING:
            return
        placed, asked = self._room.find(self.members, self.limits, reason, now)
        self._out += asked
        if placed is None:
            self._deadline = self._room.waits_until
            return
        for slot in waiting:
            self._last_words.forget(slot.rank)
        if self._trained:
            pool = self.pool
            self._out += ladder.of_launch(self.members, placed, self.limits, pool.limits, pool.num_granted)
        self._has_launched, self._homeless = True, None
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
        if self._room.deadline is not None or self.members.has_launched:
            self._launch_unplaced(reason, now)

    # ---- another world size -----------------------------------------------------------------------------------

    def _put_aside(self, rung: ladder.Rung, verdict: Plan, reason: str, now: float) -> str:
        """Let those who hold the resume step put it aside for a world of another size. Returns why that cannot be, '':
        it has begun."""
        grows = rung is ladder.Rung.GROW
        if refusal := self._resize.refusal(self.limits, grows=grows):
            return refusal
        reports = {slot.rank: slot.report for slot in self.members.slots if slot.report is not None}
        estate = resize.estate_of(self.members, reports, verdict)
        world = estate if isinstance(estate, str) else resize.plan_world(estate, self.members, self.limits)
        if isinstance(estate, str) or isinstance(world, str):
            return str(world)
        if grows and len(world) <= self.members.world_size:
            return "there is no room for another replica any more"
        self._resize.estate, self._resize.unit = estate, estate.unit
        self._resize.num += 1
        self._resize.wait(now + self.limits.resize_interval_s)
        taken = ladder.resized(rung, self.members, world, estate, self._resize.num, self.limits, reason)
        self.plan = msgspec.structs.replace(
            verdict, sources={}, stripes={}, reason=taken.reason, hands_over=estate.holders, at_boundary=grows
        )
        self._out.append(taken)
        self._move(Phase.RESIZING, taken.reason)
        self._deadline = now + self.limits.restore_timeout_s
        self._out.append(effects.PublishPlan(self.plan))
        return ""

    def _not_put_aside(self, reason: str, now: float) -> None:
        """The old world is still there: go on with it, or with the next rung."""
        self._resize.refused = reason
        self._fence(f"the world keeps its size: {reason}", now, counts=False)

    def _lose_estate(self, reason: str, now: float) -> None:
        """What was put aside is not enough for the new world."""
        self._resize.estate = None
        why = f"the state of the former world cannot be taken over: {reason}"
        self._go_back(why, (why, EXIT_REQUEUE), now, counts=True)

    def _begin_world(self, estate: Estate, reason: str, now: float) -> None:
        """All ranks begin a new life from what was put aside, wherever there are nodes for it now."""
        self._kill([slot for slot in self.members.lives() if slot.is_live], "all ranks begin a new life")
        for slot in self.members.slots:
            slot.state = "unplaced"
        world = resize.plan_world(estate, self.members, self.limits)
        if isinstance(world, str):
            self._go_back(f"{reason}; {world}", (f"{reason}; {world}", EXIT_REQUEUE), now, counts=False)
            return
        self._trained = False
        self._begin_generation()
        self._move(Phase.PLACING, f"{len(world)} ranks begin at step {estate.step}: {reason}")
        self._out.append(effects.AnnounceFence(self.generation, reason))
        placement = self.members.begin_world(world, estate, self.generation)
        self._last_words.begin_world()
        self._out.append(effects.LaunchWorkers(placement, reason))
        self._move(Phase.FORMING, "all ranks launched")
        self._deadline = now + self.limits.launch_timeout_s

    # ---- planned swap -----------------------------------------------------------------------------------------

    def _go_on_with_swap(self, now: float) -> None:
        """While training goes on: start successors, and once all are ready let everybody pause at a step boundary."""
        if self.members.is_complete or self._swap.pausing:
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
        elif self._resize.may_grow(self.members, self.limits, now):
            self._swap.pause("there is room for another replica")
            self._begin_generation()
            self._resize.grows = True
            self._out.append(effects.AnnounceFence(self.generation, self._swap.why, at_boundary=True))

    # ---- progress ---------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Leave the current phase if its condition holds; may leave several. Complete: whoever is left goes its own way
        to the end."""
        left = None
        while self.phase is not left and not self.members.is_complete and self._may_leave():
            left = self.phase
            self._leave(now)

    def _may_leave(self) -> bool:
        """The condition of the current phase holds; asked whenever a rank has said something."""
        if self._awaited is not None:
            return self._all(*self._awaited)
        estate = self._resize.estate if self.phase is Phase.RESIZING else None
        return estate is not None and self._all_put_aside.is_met(estate.holders, self._has_put_aside)

    def _has_put_aside(self, rank: int) -> bool:
        return self.members.slots[rank].restored_v is not None

    def _leave(self, now: float) -> None:
        match self.phase:
            case Phase.FENCING:
                self._move(Phase.PLACING, "all ranks have paused" if self._swap.pausing else "all survivors are fenced")
                self._deadline = self._room.waits_until or now + self.limits.launch_timeout_s
                if self._homeless is not None:
                    self._save_last(self._homeless, now)
            case Phase.PLACING if self._trained:
                waits = self._swap.pausing and not all(s.report for s in self.members.successors())
                if not waits:
                    self._decide(now)
            case Phase.FORMING:
                self._move(Phase.RESTORING, "all groups are formed")
                self._deadline = now + self.limits.restore_timeout_s
            case Phase.RESTORING:
                self._resume()
            case Phase.RESIZING:
                assert self._resize.estate is not None
                self._begin_world(self._resize.estate, "all states are put aside", now)

    def _decide(self, now: float) -> None:
        moving = [slot for slot in self.members.slots if slot.successor is not None and self._swap.pausing]
        former = {slot.rank: slot.report for slot in moving if slot.report is not None}
        for slot in moving:
            self.members.hand_over(slot)
        reports = {slot.rank: slot.report for slot in self.members.slots if slot.report is not None}
        verdict = commit.decide(self.generation, reports, former)
        if isinstance(verdict, commit.Impossible):
            reason = f"cannot restore rank {', '.join(map(str, verdict.ranks))}: {verdict.reason}"
            ending = (reason, EXIT_REQUEUE)
            if len(verdict.ranks) == self.members.world_size:
                reason = "the last state was lost"
                ending = endings.nothing_left(reason, self._last_words)
            self._go_back(reason, ending, now, counts=False)
            return
        if self._resize.grows:
            refusal = self._put_aside(ladder.Rung.GROW, verdict, self._swap.why, now)
            if not refusal:
                return
            self._out.append(effects.Tell(f"the world does not grow: {refusal}"))
            self._resize.wait(now + self.limits.resize_interval_s)
        taken_over = {slot.rank: self.members.slots[slot.rank].incarnation for slot in moving}
        self.plan = verdict = msgspec.structs.replace(verdict, successors=taken_over, at_boundary=self._swap.pausing)
        if moving:
            self._out += ladder.of_swap(self.members, [slot.rank for slot in moving], self._swap.why)
        elif not self._has_launched:
            self._out.append(ladder.in_process(verdict.reason, self._without_progress, self.limits))
        self._move(Phase.FORMING, verdict.reason)
        self._deadline = now + self.limits.form_timeout_s
        self._out.append(effects.PublishPlan(verdict))

    def _save_last(self, ending: endings.Ending, now: float) -> None:
        """Ranks have no node. If what is left holds every shard, fewer ranks go on with it; or it is saved first, then
        the job ends. (A mirror is no state that a script could save.)"""
        self._homeless = ending
        survivors = [slot for slot in self.members.slots if slot.is_survivor]
        may_shrink = self.limits.shrink != "never"
        if not self._trained or not survivors or not (self._kept.can_save or may_shrink):
            self._stop(*ending)
            return
        if self.phase is Phase.FENCING:
            self._deadline = now + self.limits.fence_timeout_s
            return  # once all have reported
        lost = Report(v=-1, voted=-1, passed=-1, valid=False, replicas=())
        reports = {slot.rank: slot.report or lost for slot in self.members.slots}
        reports = {rank: msgspec.structs.replace(report, keeps=(), holds={}) for rank, report in reports.items()}
        verdict = commit.decide(self.generation, reports)
        if isinstance(verdict, commit.Impossible):
            self._stop(f"{ending[0]}; no last checkpoint: {verdict.reason}", ending[1])
            return
        if may_shrink:
            refusal = self._put_aside(ladder.Rung.SHRINK, verdict, ending[0], now)
            if not refusal:
                return
            self._homeless = ending = (f"{ending[0]}; not with fewer ranks: {refusal}", ending[1])
        if not self._kept.can_save:
            self._stop(*ending)
            return
        savers = tuple(slot.rank for slot in survivors if slot.rank not in verdict.sources)
        rung = ladder.dying(savers, verdict.resume_step, ending[0], self.limits)
        torn = {slot.rank: verdict.sources[slot.rank] for slot in survivors if slot.rank in verdict.sources}
        self.plan = msgspec.structs.replace(verdict, sources=torn, reason=rung.reason, savers=savers)
        self._out.append(rung)
        self._move(Phase.SAVING, rung.reason)
        self._deadline = now + self.limits.save_timeout_s
        self._out.append(effects.PublishPlan(self.plan))

    def _end_saving(self, said: str, now: float) -> None:
        """The last checkpoint is complete, or will not be. A node may have come meanwhile: then the job goes on."""
        if self._room.fits(self.members, self.limits):
            self._fence(f"a node for the lost ranks has come ({said})", now, counts=False)
            return
        assert self._homeless is not None
        self._stop(f"{self._homeless[0]}; {said}", self._homeless[1])

    def _resume(self) -> None:
        at = {slot.restored_v for slot in self.members.slots}
        self._move(Phase.RUNNING, f"all ranks are ready at step {', '.join(map(str, sorted(at, key=str)))}")
        self._deadline, self._trained, self._last_words.attempt = None, True, self.generation
        self._has_launched = False
        self._resumed, self._swap.pausing = self.generation, False
        self._resize.estate, self._resize.refused = None, ""
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
        if self._all("over", lambda slot: not slot.is_live):
            self._stop(*endings.all_gone(self.members, self._last_words))

    def _timed_out(self, now: float) -> None:
        slots, limits = self.members.slots, self.limits
        if self.members.unplaced() and self.phase in (Phase.PLACING, Phase.FENCING) and self._homeless is None:
            self._out += self.pool.give_up(self.members, limits.start_timeout_s, now)
            self._launch_unplaced("out of time: whatever node there is", now)
            if self.members.unplaced() and (self._deadline is None or self._deadline <= now):
                self._save_last(endings.no_room(self.members, limits.start_timeout_s, self.pool.said), now)
        elif self.phase is Phase.SAVING:
            self._end_saving(f"no last checkpoint within {limits.save_timeout_s:g} s", now)
        elif self.phase is Phase.RESIZING:
            self._not_put_aside(f"the state was not put aside within {limits.restore_timeout_s:g} s", now)
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
