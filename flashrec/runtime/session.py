"""The step loop as the script sees it: `Session.steps` and the `with step:` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flashrec.runtime.agreement import Agreement
from flashrec.runtime.callbacks import Callbacks
from flashrec.runtime.checkpoint import Checkpoints
from flashrec.runtime.environment import num_on_node
from flashrec.runtime.handover import Handover
from flashrec.runtime.mirrors import Mirrors
from flashrec.runtime.parallel import fsdp, zero
from flashrec.runtime.parallel.ddp import DdpInstances
from flashrec.runtime.parallel.part import Part, Parts
from flashrec.runtime.parallel.pipeline import Pipelines
from flashrec.runtime.parallel.replicas import Holder, Replicas, announce, find
from flashrec.runtime.recovery import Recovery
from flashrec.runtime.registered import Alike, LargeState
from flashrec.runtime.seed import seed_all
from flashrec.runtime.snapshot import Snapshot, Stateful
from flashrec.runtime.state import State
from flashrec.runtime.step import StepGuard
from flashrec.runtime.stretches import STATE as STRETCH
from flashrec.runtime.stretches import Stretches
from flashrec.runtime.torch_private.dtensor import make_random_tracker
from flashrec.runtime.tree import Trees
from flashrec.runtime.untouched import Untouched
from flashrec.runtime.update import Update
from flashrec.runtime.vote import AllReduce, Vote
from flashrec.runtime.worker import Worker

_NOT_TRAINING = frozenset({"init", "done"})


class Guard(Protocol):
    """What a loop needs: with recovery (`StepGuard`) or without (`PassThrough`)."""

    before_pause: Callable[[], None]  # called when a step counts and this rank may not go on after it

    @property
    def position(self) -> int: ...

    def use(self, checkpoints: Checkpoints) -> None: ...

    def load(self) -> int | None: ...

    def begin(self, start: int, num_steps: int) -> int: ...

    def finish(self, num_steps: int) -> bool: ...

    def enter(self, step: int) -> None: ...

    def leave(self, error: BaseException | None) -> bool: ...

    def may_commit(self, step: int | None, timeout_s: float) -> bool: ...


class Step(int):
    """The number of a step, and the context manager around its work. It is an int: `step % 100 == 0` works."""

    _guard: Guard
    _callbacks: Callbacks
    is_entered: bool

    def __new__(cls, number: int, guard: Guard, callbacks: Callbacks) -> Step:
        step = super().__new__(cls, number)
        step._guard, step._callbacks, step.is_entered = guard, callbacks, False
        return step

    @property
    def index(self) -> int:
        return int(self)

    @property
    def is_done(self) -> bool:
        """After the block: True when the step counts, False when it will be yielded again."""
        return self.is_entered and self._guard.position > int(self)

    def __enter__(self) -> Step:
        if self._callbacks.due:  # an exception of the script has kept them back
            self._callbacks.run(self._guard.position)
        self._guard.enter(int(self))
        self.is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        is_handled = self._guard.leave(error) and error is not None
        if error is None or is_handled:
            self._callbacks.run(self._guard.position)
        return is_handled

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class PassThrough:
    """Without `flashrec run`: the same loop and the same seeds, nothing else."""

    def __init__(self, seed: int | None, seed_rank: int | None = None) -> None:
        self._seed, self._seed_rank, self.position = seed, seed_rank, 0
        self.before_pause: Callable[[], None] = lambda: None
        self._checkpoints: Checkpoints | None = None

    def use(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def load(self) -> int | None:
        return None if self._checkpoints is None else self._checkpoints.load_newest()

    def begin(self, start: int, num_steps: int) -> int:
        self.position = start
        return start

    def finish(self, num_steps: int) -> bool:
        self._save_if_due(num_steps)
        return True

    def _save_if_due(self, step: int) -> None:
        if self._checkpoints is not None and self._checkpoints.is_due(step):
            self._checkpoints.keep(step)

    def enter(self, step: int) -> None:
        self._save_if_due(step)
        if self._seed is not None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            seed_all(self._seed, step, rank if self._seed_rank is None else self._seed_rank)

    def leave(self, error: BaseException | None) -> bool:
        if error is None:
            self.position += 1
        return False

    def may_commit(self, step: int | None, timeout_s: float) -> bool:
        return True


class StepLoop:
    """Yields the steps of one training loop."""

    def __init__(self, guard: Guard) -> None:
        self._guard, self.callbacks = guard, Callbacks()
        self._guard.before_pause = lambda: self.callbacks.run(guard.position)
        self._is_used, self.has_checkpoints = False, False
        self._num_steps: int | None = None

    @property
    def position(self) -> int:
        """The step to do next."""
        return self._guard.position

    def num_batches(self, per_step: int) -> int | None:
        """Batches of the whole loop; None before `steps` was called."""
        return None if self._num_steps is None else self._num_steps * per_step

    def may_commit(self, step: int | None, timeout_s: float) -> bool:
        return self._guard.may_commit(step, timeout_s)

    def use(self, checkpoints: Checkpoints) -> None:
        """Raises RuntimeError: too late, or for the second time."""
        if self._is_used or self.has_checkpoints:
            raise RuntimeError("call session.checkpoint() once, before session.steps()")
        self.has_checkpoints = True
        self._guard.use(checkpoints)

    def steps(self, num_steps: int, start: int) -> Iterator[Step]:
        if self._is_used:
            raise RuntimeError("session.steps() can be used once: loop over all steps in one go, and compute the epoch")
        self._is_used, self._num_steps = True, num_steps
        loaded = self._guard.load()
        self.callbacks.begin(self._guard.begin(start if loaded is None else loaded, num_steps))
        while True:
            while self._guard.position < num_steps:
                step = Step(self._guard.position, self._guard, self.callbacks)
                yield step
                if not step.is_entered:
                    raise RuntimeError(
                        f"step {step.index} was not entered: write `with step:` around the work of a step"
                    )
            if self._guard.finish(num_steps):
                return


def recoverable_guard(
    worker: Worker,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    objects: Mapping[str, Stateful],
    replicas: Sequence[int] | None,
    seed: int | None,
    seed_rank: int | None,
    schedules: Sequence[Any] = (),
    optimizer_communicates: bool | None = None,
    mirrors: bool | str = False,
    stretches: Stretches | None = None,
) -> StepGuard:
    """Everything that guards the steps of one model. Raises what says why this model cannot be recovered."""
    listed = list(optimizers)
    sharded = fsdp.FsdpModules(model) if fsdp.is_used(model) else None
    devices = {sharded.device} if sharded is not None else {param.device for param in model.parameters()}
    trees = _trees(worker, devices)
    ddp = DdpInstances(
        model, None if trees is None else trees.spread, lambda: worker.progress.where not in _NOT_TRAINING
    )
    objects = {**objects, **ddp.hook_states()}
    kinds: list[Part] = [ddp, Pipelines(model, schedules), Untouched(model, listed)]
    kept = dict(objects)
    device = next(iter(devices), torch.device("cpu"))
    if sharded is not None:
        kinds.append(sharded)
        kept["flags of FSDP"] = sharded
    if any(map(zero.is_zero, listed)):
        kinds.append(zero.ZeroOptimizers(listed, worker.rank, worker.env.world_size))
    update = Update(listed, optimizer_communicates, worker.groups.num_issued, worker.groups.drain)
    found = _replicas(worker, model, kinds, replicas, device, is_mirrored=bool(mirrors))
    agreement = Agreement(
        worker.rank,
        found,
        model.parameters(),
        listed,
        device,
        is_trusted=lambda: replicas is not None or not update.votes_after or all(map(zero.is_zero, listed)),
    )
    make_random_tracker(model)
    snapshot = Snapshot(model, listed, kept, keeps_random_state=seed is None)
    alike = Alike(worker.rank, agreement.ranks, objects, device)
    kinds += [agreement, alike, update]
    stretches = stretches or Stretches()
    state = State(model, listed, {**objects, STRETCH: stretches}, sends_random_state=seed is None)
    mirror = Mirrors(worker, state, mirrors, agreement.ranks, device) if mirrors else None
    parts = Parts(kinds if mirror is None else [*kinds, mirror], [LargeState(snapshot)] if snapshot.has_large else [])
    if mirror is not None:
        mirror.describe_all = parts.describe
    recovery = Recovery(worker, agreement.ranks, parts, state, snapshot, listed, mirror)
    rigid = _rigid(listed, schedules, has_mirrors=mirror is not None)
    recovery.handover = Handover(
        worker, state, stretches, agreement.ranks, lambda: rigid or update.rigid, device, num_on_node()
    )
    if trees is None:
        all_reduce = AllReduce(device)
        vote = Vote(worker.progress, worker.env.world_size, lambda: all_reduce)
    else:
        vote = Vote(worker.progress, worker.env.world_size, trees.current)
    return StepGuard(worker, recovery, vote, update, parts, snapshot, listed, seed, seed_rank, mirror)


def _trees(worker: Worker, devices: set[torch.device]) -> Trees | None:
    """None: backward returns before gradients are complete, so that the vote has to be ordered after them."""
    return Trees(worker) if all(device.type == "cpu" for device in devices) else None


def _rigid(optimizers: Sequence[torch.optim.Optimizer], schedules: Sequence[Any], *, has_mirrors: bool) -> str:
    """What of a layout belongs to one world size."""
    if has_mirrors:
        return "Session(mirrors=…) keeps the shards of one world size"
    if schedules:
        return "a pipeline has been tried with one world size only"
    if any(map(zero.is_zero, optimizers)):
        return "ZeroRedundancyOptimizer shards its state by the world size"
    return ""


def _replicas(
    worker: Worker,
    model: torch.nn.Module,
    kinds: list[Part],
    given: Sequence[int] | None,
    device: torch.device,
    *,
    is_mirrored: bool,
) -> tuple[int, ...]:
    if given is not None:
        found = Replicas(tuple(sorted({*given, worker.rank})), "as the script says")
    else:
        found = find(model, worker.rank, [part for part in kinds if isinstance(part, Holder)])
    if not worker.env.joins:
        announce(found, worker.timeline, device, is_mirrored=is_mirrored)
    return found.ranks
