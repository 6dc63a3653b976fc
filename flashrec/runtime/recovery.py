"""From a fence to the next step: report, wait for the plan, form, restore, wait for the resume.

    fence(g) ─► report(g) ─► plan(g) ─► form groups ─► roll back │ receive the state ─► serve targets ─► restored(g)
       ▲                                                                                                     │
       └──────────────────────── a newer fence, at any point, starts again ◄─────────────────── resume(g) ◄──┘

The tags of `progress` are all that a repeated attempt needs: nothing here has to be undone when it is cut.
Rolling *forward* is not done here but by the script itself, see `step`. In a planned swap the worker that is given up
takes part up to the plan; then it stands by, and may be asked to send its state to its successor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import msgspec
import torch

from flashrec.core import events
from flashrec.core.types import Plan
from flashrec.runtime import stuck, transfer
from flashrec.runtime.checkpoint import Checkpoints
from flashrec.runtime.errors import NotUnblockable, RecoveryFailed, Superseded, TrainingComplete
from flashrec.runtime.handover import Handover
from flashrec.runtime.mirrors import Mirrors
from flashrec.runtime.parallel.part import Parts
from flashrec.runtime.snapshot import Snapshot
from flashrec.runtime.state import State
from flashrec.runtime.timeline import Moving, Watch, logger
from flashrec.runtime.worker import Worker


class Recovery:
    """Brings this rank into the newest generation."""

    def __init__(
        self,
        worker: Worker,
        replicas: Callable[[], tuple[int, ...]],
        parts: Parts,
        state: State,
        snapshot: Snapshot,
        optimizers: list[torch.optim.Optimizer],
        mirrors: Mirrors | None = None,
    ) -> None:
        self._worker, self._replicas, self._mirrors = worker, replicas, mirrors
        self._parts, self._state, self._snapshot, self._optimizers = parts, state, snapshot, optimizers
        self.checkpoints: Checkpoints | None = None
        self.handover: Handover | None = None
        self.before_end: Callable[[], None] = lambda: None  # this life ends although its newest step counts

    def await_plan(self) -> Plan:
        """Report where this rank stands and wait for the decision. Raises TrainingComplete, WaitedTooLong."""
        worker, progress = self._worker, self._worker.progress
        progress.where = "recovery"
        while True:
            generation = worker.board.announced
            report = progress.report(self._replicas())
            if self.handover is not None:
                unit, rigid = self.handover.describe()
                report = msgspec.structs.replace(report, unit=unit, rigid=rigid)
            if self._mirrors is not None:
                report = self._mirrors.freeze(report)
            worker.control.send(
                events.WorkerReported(
                    rank=worker.rank, incarnation=worker.env.incarnation, generation=generation, report=report
                )
            )
            progress.reported = generation
            worker.timeline.mark(
                "reported", generation=generation, v=report.v, voted=report.voted, passed=report.passed
            )
            try:
                plan = worker.board.wait_plan(generation, worker.limits.plan_timeout_s)
            except Superseded:
                continue
            worker.timeline.mark("planned", generation=generation, resume_step=plan.resume_step)
            return plan

    def run(self, plan: Plan | None = None) -> None:
        """Recover, from `plan` on when it is there already. Returns when the step loop may go on.

        Raises TrainingComplete, RecoveryFailed, CannotEncode.
        """
        watch = Watch()
        while True:
            generation = self._worker.board.announced
            try:
                plan = plan or self.await_plan()
                generation = plan.generation
                if plan.successors.get(self._worker.rank, self._worker.env.incarnation) != self._worker.env.incarnation:
                    self._stand_by(plan)
                self._execute(plan)
            except Superseded:
                pass
            except TrainingComplete:
                raise
            except (OSError, RuntimeError) as err:
                self._wait_out(err, generation)
            else:
                self._worker.timeline.mark("resumed", generation=generation, total_ms=watch.ms())
                return
            plan = None

    def _wait_out(self, err: Exception, generation: int) -> None:
        """An error while forming or restoring: a peer was lost (then a fence follows), or it is ours."""
        board = self._worker.board
        if board.announced > generation:
            return
        if isinstance(err, RecoveryFailed) and not isinstance(err, NotUnblockable):
            raise err
        logger.info("recovery into generation %d was cut, waiting for the next fence: %s", generation, err)
        if not board.wait_fence(generation, self._worker.limits.fence_timeout_s):
            raise err

    def _stand_by(self, plan: Plan) -> NoReturn:
        """Another life of this rank takes over: our end comes, or a newer fence. Raises Superseded."""
        worker = self._worker
        worker.timeline.mark("standing_by", generation=plan.generation, v=worker.progress.v)
        if plan.sources.get(worker.rank) == worker.rank:
            self._serve(plan, worker.rank)
        worker.board.wait_resume(plan.generation, worker.limits.resume_timeout_s)
        worker.control.give_up(f"the successor of rank {worker.rank} has taken over in generation {plan.generation}")

    def _execute(self, plan: Plan) -> None:
        worker, progress = self._worker, self._worker.progress
        progress.where = "recovery"
        if not worker.board.was_cut(plan.generation):
            worker.groups.unblock()  # nobody is in a collective any more
        if plan.savers:
            self._save_last(plan)
        if plan.hands_over:
            self._hand_over(plan)
        worker.groups.form(plan.generation)
        worker.control.send(
            events.WorkerFormed(rank=worker.rank, incarnation=worker.env.incarnation, generation=plan.generation)
        )
        moved: transfer.Moved | None = None
        if self._mirrors is not None:
            self._mirrors.forget_after(plan.resume_step)
        if worker.rank in plan.goes_back:
            moved = self._go_back(plan)
        elif worker.rank in plan.sources:
            moved = self._receive(plan)
        elif progress.v == plan.resume_step and progress.valid:
            self._parts.settle_for(progress.v)
            if self._snapshot.step == progress.v:
                self._snapshot.restore()
        else:
            raise RecoveryFailed(
                f"the plan resumes at step {plan.resume_step}, but rank {worker.rank} holds step {progress.v} "
                f"(valid: {progress.valid}) and is given no source. This is a bug of flashrec"
            )
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        served = [t for t in plan.sources if t != worker.rank and worker.rank in _sources(plan, t)]
        for target in sorted(served):
            self._serve(plan, target)
        self._parts.complete()
        worker.control.send(
            events.WorkerRestored(
                rank=worker.rank,
                incarnation=worker.env.incarnation,
                generation=plan.generation,
                v=progress.v,
                moved_bytes=moved.num_bytes if moved else 0,
                digest=moved.digest if moved else "",
            )
        )
        worker.board.wait_resume(plan.generation, worker.limits.resume_timeout_s)
        progress.generation = plan.generation
        worker.board.forget_before(plan.generation)

    def _save_last(self, plan: Plan) -> NoReturn:
        """Lost ranks have no node: write what is left, together with the other savers, and wait for our end. Raises
        Superseded when a node has come after all, or another survivor was lost."""
        worker, progress = self._worker, self._worker.progress
        if worker.rank in plan.savers:
            try:
                assert self.checkpoints is not None
                self._settle(plan)
                progress.generation = plan.generation
                with worker.groups.among(plan.savers, plan.generation) as group:
                    self.checkpoints.keep(plan.resume_step, "dying", group)
            except BaseException as err:  # torch.distributed.checkpoint raises one that is no Exception
                if isinstance(err, Superseded | KeyboardInterrupt | SystemExit):
                    raise
                self._check_current(plan)
                logger.exception("rank %d could not write the last checkpoint", worker.rank)
                worker.control.send(
                    events.CheckpointFailed(
                        worker.rank, worker.env.incarnation, plan.generation, plan.resume_step, repr(err)[:500]
                    )
                )
        worker.board.wait_resume(plan.generation, worker.limits.resume_timeout_s)
        raise RecoveryFailed(f"resumed in generation {plan.generation}, which was to end. This is a bug of flashrec")

    def _hand_over(self, plan: Plan) -> NoReturn:
        """A world of another size follows: put the state aside for its ranks, and wait for our end. Raises Superseded
        when another rank could not, or was lost."""
        worker, progress = self._worker, self._worker.progress
        if worker.rank in plan.hands_over:
            who = (worker.rank, worker.env.incarnation, plan.generation)
            try:
                assert self.handover is not None
                self._settle(plan)
                self.before_end()
                num_bytes = self.handover.put_aside(plan.resume_step, plan.generation)
                worker.control.send(events.HandedOver(*who, progress.v, num_bytes))
            except Exception as err:
                if isinstance(err, Superseded):
                    raise
                self._check_current(plan)
                logger.exception("rank %d could not put its state aside", worker.rank)
                worker.control.send(events.NotHandedOver(*who, repr(err)[:500]))
        worker.board.wait_resume(plan.generation, worker.limits.resume_timeout_s)
        raise RecoveryFailed(f"resumed in generation {plan.generation}, which was to end. This is a bug of flashrec")

    def _settle(self, plan: Plan) -> None:
        """As at the start of the resume step, without groups. Raises NotUnblockable, RecoveryFailed."""
        progress = self._worker.progress
        if progress.v != plan.resume_step or not progress.valid:
            raise RecoveryFailed(f"holds step {progress.v} (valid: {progress.valid}), not {plan.resume_step}")
        if not stuck.await_idle(self._worker.limits.unblock_timeout_s):
            raise NotUnblockable("operations of the step that was cut have not ended")
        self._parts.settle_for(progress.v)
        if self._snapshot.step == progress.v:
            self._snapshot.restore()

    def _receive(self, plan: Plan) -> transfer.Moved:
        worker, progress, watch = self._worker, self._worker.progress, Watch()
        progress.valid = False
        store = self._restore_store(plan, worker.rank)
        with worker.sockets.watch(transfer.listen(worker.control.welcome.address)) as listener:
            self._check_current(plan)
            address = transfer.Address(worker.control.welcome.address, listener.getsockname()[1])
            store.set("address", msgspec.msgpack.encode(address))
            listener.settimeout(worker.limits.resume_timeout_s)  # the source may have other targets before us
            moved = transfer.receive_state(
                listener,
                worker.sockets,
                worker.secret,
                self._state,
                worker.limits.transfer_timeout_s,
                Moving("receiving", worker.timeline),
                sources=_sources(plan, worker.rank),
                check=lambda: self._check_current(plan),
            )
        if moved.manifest.v != plan.resume_step:
            raise RecoveryFailed(f"the source sent step {moved.manifest.v}, the plan says {plan.resume_step}")
        self._take_over(plan, moved)
        self._mark_moved("received", plan, moved, watch)
        return moved

    def _go_back(self, plan: Plan) -> transfer.Moved:
        """Take the state from the copy that this rank keeps itself."""
        assert self._mirrors is not None
        watch = Watch()
        self._worker.progress.valid = False
        self._worker.groups.drain()  # an update that was cut may still be receiving parameters
        moved = self._mirrors.go_back(plan.resume_step)
        self._take_over(plan, moved)
        self._mark_moved("went_back", plan, moved, watch)
        return moved

    def _take_over(self, plan: Plan, moved: transfer.Moved) -> None:
        """The tensors are those of the resume step: so is the rest, from here on."""
        progress = self._worker.progress
        self._snapshot.forget()
        self._parts.impose(moved.manifest.parts)
        progress.v = plan.resume_step
        progress.voted = progress.passed = plan.resume_step - 1
        progress.valid = True

    def _serve(self, plan: Plan, target: int) -> None:
        worker, watch = self._worker, Watch()
        store = self._restore_store(plan, target)
        address = msgspec.msgpack.decode(store.get("address"), type=transfer.Address)
        self._check_current(plan)
        moved = transfer.send(
            address,
            worker.sockets,
            worker.secret,
            self._holding(plan, target),
            worker.limits.transfer_timeout_s,
            Moving("sending", worker.timeline),
            source=worker.rank,
            num_sources=len(_sources(plan, target)),
            patience_s=worker.limits.resume_timeout_s,
            check=lambda: self._check_current(plan),
        )
        self._mark_moved("sent", plan, moved, watch)

    def _holding(self, plan: Plan, target: int) -> transfer.Holding:
        """What `target` is to get: its mirror, or our own state."""
        if target in plan.mirrored:
            assert self._mirrors is not None
            return self._mirrors.held(target, plan.resume_step)
        return transfer.Holding.of(self._state, self._worker.progress.v, self._parts.describe())

    def _restore_store(self, plan: Plan, target: int):  # type: ignore[no-untyped-def]
        members = (*_sources(plan, target), target)
        return self._worker.store(f"restore/{target}", members, plan.generation, self._worker.limits.form_timeout_s)

    def _check_current(self, plan: Plan) -> None:
        if self._worker.board.announced > plan.generation:
            raise Superseded(f"generation {plan.generation} is superseded")

    def _mark_moved(self, what: str, plan: Plan, moved: transfer.Moved, watch: Watch) -> None:
        ms = watch.ms()
        self._worker.timeline.mark(
            what, generation=plan.generation, bytes=moved.num_bytes, ms=ms, gb_per_s=moved.num_bytes / ms / 1e6
        )


def _sources(plan: Plan, target: int) -> tuple[int, ...]:
    """Ranks that send the state of `target`, all or parts of it; the first one what they may differ in."""
    return (plan.sources[target], *plan.stripes.get(target, ()))
