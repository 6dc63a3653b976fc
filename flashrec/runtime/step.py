"""One step of the training loop: what `with step:` and the optimizer hooks do.

    IDLE ── enter ──► OPEN ── vote passed ──► UPDATING ── last optimizer ──► COMMITTED ── block ends ──► IDLE
                       │  no optimizer step in the block: the vote is cast at its end ──────────▲

For optimizers that communicate the vote is cast after the last one instead (see `update`):

                      OPEN ── copied ──► UPDATING ── last optimizer, vote passed ──► COMMITTED

A failure is handled where it shows:

* in the vote: this rank waits there for the plan. "Redo i": `StepInterrupted` unwinds the block. "Go on to i+1": the
  hook returns, so the script's own `optimizer.step()` and what follows it run once, as ever, and the rest of the
  recovery happens at the end of the block. No code of the user is replayed by us.
* in something else that waits: `interrupt` raises StepInterrupted there, if the block is before its vote.
* elsewhere in the block: the exception is swallowed, `steps()` yields the right step again. Only when a fence is there
  or comes: a bug of the script goes through at once.
* between the optimizer's hooks: the state is torn, this rank becomes a target like a replacement. Where the update can
  be undone it is, and this rank does the step again.
* before the block has begun: with mirrors this step may not be the one to go on with. So the block is entered, and the
  failure shows at its first collective, or in the vote.
* all pause after this step (a vote said so): nothing is cut. At the end of the block this rank goes through a recovery
  in which it has nothing to do again.
* after the optimizer: step i counts as done. A scheduler that was to be stepped after the collective which failed
  would be left behind, so such a rank counts as torn, too.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from typing import Any

import torch

from flashrec.core import events
from flashrec.core.types import Plan
from flashrec.runtime import permit
from flashrec.runtime.checkpoint import Checkpoints
from flashrec.runtime.errors import (
    RecoveryFailed,
    StepInterrupted,
    TrainingComplete,
    is_communication,
    peers_named_by,
)  # fmt: skip
from flashrec.runtime.keeping import Keeper
from flashrec.runtime.mirrors import Mirrors
from flashrec.runtime.parallel.part import Parts
from flashrec.runtime.quiet import quiet
from flashrec.runtime.recovery import Recovery
from flashrec.runtime.seed import seed_all
from flashrec.runtime.snapshot import Snapshot
from flashrec.runtime.timeline import logger
from flashrec.runtime.update import Update
from flashrec.runtime.vote import Vote
from flashrec.runtime.worker import Worker
from flashrec.wire import messages as m


class Stage(enum.Enum):
    """Where inside a step this rank is."""

    IDLE = "idle"
    OPEN = "open"
    UPDATING = "updating"
    COMMITTED = "committed"


class StepGuard:
    """Guards the steps of one session under `flashrec run`."""

    def __init__(
        self,
        worker: Worker,
        recovery: Recovery,
        vote: Vote,
        update: Update,
        parts: Parts,
        snapshot: Snapshot,
        optimizers: list[torch.optim.Optimizer],
        seed: int | None,
        seed_rank: int | None = None,
        mirrors: Mirrors | None = None,
    ) -> None:
        self._mirrors = mirrors
        self._keeper = Keeper(worker, self._is_fault)
        self._worker, self._recovery, self._vote, self._update = worker, recovery, vote, update
        recovery.before_end = self._end
        self._parts, self._snapshot, self._optimizers, self._seed = parts, snapshot, optimizers, seed
        self._seed_rank = worker.rank if seed_rank is None else seed_rank
        self._stage = Stage.IDLE
        self._step = -1
        self._stepped: set[int] = set()
        self._plan: Plan | None = None  # received in the vote, to be carried out at the end of the block
        self._num_steps = -1
        self._pauses = False  # a vote of this step said that all ranks pause after it
        self._committed_generation = -1
        self._is_training = False
        self._has_warned = False
        self.before_pause: Callable[[], None] = lambda: None  # after it this life may be given up
        this = weakref.ref(self)  # the worker lives as long as the process, and must not keep a model alive
        worker.interrupter.may_interrupt = lambda: (guard := this()) is not None and guard._may_be_left
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)
            optimizer.register_step_post_hook(self._after_optimizer)

    def _end(self) -> None:
        self.before_pause()

    def use(self, checkpoints: Checkpoints) -> None:
        """Save through these hooks when a step is due, and when survivors are told to."""
        self._recovery.checkpoints = checkpoints
        self._keeper.use(checkpoints)

    def load(self) -> int | None:
        """Before `begin`: the step of what all ranks have taken over from a former world, or of the checkpoint that
        they have loaded."""
        if self._worker.env.resized and self._recovery.handover is not None:
            with quiet(self._worker, "taking the state over"):
                return self._recovery.handover.inherit()
        return self._keeper.load()

    # ---- the loop -----------------------------------------------------------------------------------------------

    def begin(self, start: int, num_steps: int) -> int:
        """Before the first step: a replacement is restored, the others wait for each other. Returns the first step."""
        worker, progress = self._worker, self._worker.progress
        self._num_steps = num_steps
        if worker.env.joins:
            self._recover()
        else:
            progress.v, progress.voted, progress.passed = start, start - 1, start - 1
            if self._mirrors is not None:
                self._mirrors.secure(start)
            worker.control.send(
                events.WorkerRestored(
                    rank=worker.rank, incarnation=worker.env.incarnation, generation=progress.generation, v=start
                )
            )
            worker.board.wait_resume(progress.generation, worker.limits.resume_timeout_s)
            worker.timeline.mark("resumed", generation=progress.generation)
        self._is_training, progress.where = True, "idle"
        return progress.v

    @property
    def _is_fenced(self) -> bool:
        return self._worker.board.announced > self._worker.progress.generation

    @property
    def _may_be_left(self) -> bool:
        """The block is before its vote: to leave it and do the step again tears nothing."""
        return self._stage is Stage.OPEN and self._plan is None

    @property
    def position(self) -> int:
        """The step to do next."""
        return self._worker.progress.v

    def finish(self, num_steps: int) -> bool:
        """The final vote. False: a failure was recovered from, and the loop may have steps to do again."""
        worker, progress = self._worker, self._worker.progress
        try:
            if self._is_fenced or not self._keeper.save_if_due(num_steps):
                self._recover()
                return False
            try:
                self._vote.cast(num_steps)
            except Exception as err:
                if not self._is_fault(err):
                    raise
                self._recover()
                return False
        except TrainingComplete:
            worker.timeline.mark("complete", v=progress.v)
        progress.where, self._is_training = "done", False
        worker.control.send(events.WorkerFinished(rank=worker.rank, incarnation=worker.env.incarnation, v=progress.v))
        return True

    def may_commit(self, step: int | None, timeout_s: float) -> bool:
        return permit.ask(self._worker, step, timeout_s)

    # ---- the block ----------------------------------------------------------------------------------------------

    def enter(self, step: int) -> None:
        worker, progress = self._worker, self._worker.progress
        if self._stage is not Stage.IDLE or step != progress.v:
            raise RuntimeError(
                f"`with step` of step {step}: enter each step of session.steps() once, one after the other"
            )
        keeper = self._keeper
        while worker.board.announced > progress.generation or (keeper.checkpoints and not keeper.save_if_due(step)):
            if self._mirrors is not None:  # this step may not be the one to go on with: its block will find out
                break
            self._recover()
            if step != progress.v:
                raise RecoveryFailed(f"fenced before step {step} began, but told to resume at {progress.v}")
        self._step, self._plan, self._pauses = step, None, False
        self._stepped.clear()
        self._parts.open(step)
        self._snapshot.take(step)
        if self._seed is not None:
            seed_all(self._seed, step, self._seed_rank)
        self._stage, progress.where = Stage.OPEN, "step"

    def leave(self, error: BaseException | None) -> bool:
        """End of the block. Returns True when `error` is dealt with."""
        self._snapshot.close()
        try:
            if error is None and self._stage is Stage.COMMITTED and self._plan is None and not self._pauses:
                return True
            return self._leave(error)
        finally:
            self._stage, self._worker.progress.where = Stage.IDLE, "idle"

    def _leave(self, error: BaseException | None) -> bool:
        if error is None:
            return self._leave_in_order()
        if isinstance(error, StepInterrupted) and self._plan is not None:
            self._recover(self._plan)
            return True
        if not isinstance(error, Exception | StepInterrupted) or isinstance(error, RecoveryFailed | TrainingComplete):
            return False
        torn = self._torn_by(error)
        if self._plan is not None:  # we have said that we can finish this step
            if torn:
                logger.error("step %d cannot be finished (%s): this rank gives up and is replaced", self._step, torn)
                return False
        elif not self._is_fault(error):
            return False
        if torn:
            logger.warning("rank %d is restored from another rank: %s", self._worker.rank, torn)
            self._worker.progress.valid = False
        self._worker.timeline.mark("caught", step=self._step, stage=self._stage.value, error=str(error)[:80])
        self._recover(self._plan)
        return True

    def _leave_in_order(self) -> bool:
        try:
            if self._stage is Stage.OPEN:  # no optimizer step: a GradScaler skipped it
                self._warn_about_accumulation()
                self._pass_vote()
                self._commit()
            elif self._stage is Stage.UPDATING:  # not every optimizer takes part in every step
                self._end_update()
        except StepInterrupted:
            self._recover(self._plan)
            return True
        if self._plan is not None:
            self._recover(self._plan)
        elif self._pauses and self._worker.progress.v != self._num_steps:  # else the job is as good as done
            self.before_pause()
            self._worker.timeline.mark("paused", v=self._worker.progress.v)
            worker = self._worker
            worker.board.await_boundary(worker.progress.generation, worker.limits.fence_timeout_s)
            self._recover()
        return True

    # ---- the optimizer ------------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_training:
            return
        if self._stage is Stage.IDLE:
            raise RuntimeError("optimizer.step() outside of `with step:` cannot be recovered; move it into the block")
        if self._stage is Stage.COMMITTED or id(optimizer) in self._stepped:
            raise RuntimeError("a second optimizer.step() in one `with step:`; use one block for each optimizer step")
        if (len(args) > 1 or kwargs) and any(value is not None for value in (*args[1:], *kwargs.values())):
            raise RuntimeError("optimizer.step(closure) computes gradients after the vote; call it without a closure")
        if self._stage is Stage.OPEN:
            self._begin_update()
        self._worker.progress.where = "optimizer"

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stage is not Stage.UPDATING:
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._end_update()

    def _begin_update(self) -> None:
        if self._update.votes_after:
            self._parts.before_vote(self._step)
        else:
            self._pass_vote()
        self._update.begin(self._step)
        self._stage = Stage.UPDATING

    def _end_update(self) -> None:
        if self._update.votes_after:
            self._pass_vote()
        self._update.end()
        self._commit()

    def _pass_vote(self) -> None:
        """Return when this step counts; raise StepInterrupted when it is to be done again."""
        try:
            if self._stage is Stage.OPEN:
                self._parts.before_vote(self._step)
            self._pauses = self._vote.cast(self._step, self._worker.board.wants_pause)
        except Exception as err:
            if not self._is_fault(err):
                raise
            self._plan = plan = self._recovery.await_plan()
            if plan.resume_step == self._step or self._worker.rank in {*plan.sources, *plan.goes_back}:
                raise StepInterrupted(f"step {self._step} is done again") from err
            if plan.resume_step != self._step + 1 or self._worker.progress.voted != self._step:
                raise RecoveryFailed(
                    f"rank {self._worker.rank} is in step {self._step} and is told to resume at {plan.resume_step}"
                ) from err
            what = "rolling_forward" if self._stage is Stage.OPEN else "kept_update"
            self._worker.timeline.mark(what, step=self._step, generation=plan.generation)

    def _commit(self) -> None:
        worker, progress = self._worker, self._worker.progress
        progress.v, progress.where, self._stage = self._step + 1, "step", Stage.COMMITTED
        if self._committed_generation < progress.generation:
            self._committed_generation = progress.generation
            worker.control.send(
                events.WorkerCommitted(
                    rank=worker.rank,
                    incarnation=worker.env.incarnation,
                    generation=progress.generation,
                    v=progress.v,
                )
            )

    # ---- faults -------------------------------------------------------------------------------------------------

    def _is_fault(self, error: BaseException) -> bool:
        """True when a fence explains `error`. A communication error is given time for its fence to arrive."""
        worker = self._worker
        if worker.board.announced > worker.progress.generation or worker.board.complete:
            return True
        if not is_communication(error):
            return False
        if worker.board.wait_fence(worker.progress.generation, worker.limits.blame_after_s):
            return True
        if peers := peers_named_by(error):
            generation = worker.progress.generation
            worker.control.send(m.PeersBlamed(worker.rank, worker.env.incarnation, generation, peers))
        if worker.board.wait_fence(worker.progress.generation, worker.limits.fence_timeout_s):
            return True
        logger.error(
            "a collective failed, but no failure was announced within %g s: not recovered from",
            worker.limits.fence_timeout_s,
        )
        return False

    def _torn_by(self, error: BaseException) -> str:
        if self._stage is Stage.UPDATING:
            if self._update.can_undo(self._step) and self._worker.progress.voted < self._step:
                return ""
            return f"its optimizer step was cut by {type(error).__name__}: {error}"
        if self._stage is Stage.COMMITTED and (names := self._snapshot.left_behind()):
            return (
                f"{', '.join(f'state[{name!r}]' for name in names)} was not advanced after optimizer.step(), because a "
                "collective in between failed; communicate before optimizer.step(), or after everything is stepped"
            )
        return ""

    def _recover(self, plan: Plan | None = None) -> None:
        self._plan = None
        try:
            self._recovery.run(plan)
            self._worker.progress.where = "idle"
        except TrainingComplete:
            if self._worker.progress.valid:
                raise
            self._worker.control.leave("training is complete; a replacement without state has nothing to do")

    def _warn_about_accumulation(self) -> None:
        has_gradients = any(
            param.grad is not None
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        )
        if has_gradients and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "step %d ended without optimizer.step() and with gradients. If a GradScaler skipped it, all is well. "
                "If you accumulate gradients over several steps: put all micro-batches of an update into one block, "
                "or they are lost in a recovery",
                self._step,
            )
