"""DDP: the gradient buckets must be the same on every rank, and the same as in an undisturbed run.

DDP starts with one layout and, after its first backward, rebuilds the buckets in the order in which gradients came
(rank 0 broadcasts). A replacement starts with the first layout and would issue other all-reduces: gloo then ends the
process. And a layout decides which elements share a ring chunk, so it decides the bits of the sums.

Therefore: (1) a due rebuild is done before the vote of the same step, so whoever passed a vote has rebuilt; (2) each
rank remembers the layout before its last rebuild, and goes back to it when that very step is done again; (3) the
source sends its layout and the target imposes it; (4) every rank resets its reducer, so that the next rebuild, which
is a collective, happens on all ranks in the same step.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flashrec.runtime.errors import LayoutMismatch
from flashrec.runtime.torch_private import ddp as private
from flashrec.runtime.torch_private.ddp import BucketLayout

logger = logging.getLogger("flashrec.runtime")


class DdpInstances:
    """All DDP instances inside one model, in module order. See `flashrec.runtime.parallel.part.Part`."""

    name = "ddp"

    def __init__(self, model: torch.nn.Module) -> None:
        self._instances = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        for ddp in self._instances:
            if ddp.static_graph:
                raise NotImplementedError(
                    "DistributedDataParallel(static_graph=True) cannot be recovered; leave it off"
                )
            if ddp.mixed_precision is not None:
                raise NotImplementedError(
                    "DistributedDataParallel(mixed_precision=…) cannot be recovered; use autocast"
                )
            if private.has_comm_hooks(ddp):
                logger.warning(
                    "a DDP communication hook is registered: its own state (error feedback of PowerSGD) is not restored"
                )
        self._layouts = [private.layout(ddp) for ddp in self._instances]
        self._before = list(self._layouts)  # the layout before the last rebuild …
        self._rebuilt_in = -1  # … which happened in this step
        self._rebuilt = [private.is_rebuilt(ddp) for ddp in self._instances]

    def replicas(self, world_size: int) -> tuple[int, ...]:
        """Ranks that hold the same state: those of the DDP group when all instances agree, else all."""
        found = {tuple(dist.get_process_group_ranks(ddp.process_group)) for ddp in self._instances}
        return found.pop() if len(found) == 1 else tuple(range(world_size))

    def before_vote(self, step: int) -> None:
        """Do the rebuild that the next forward would do. Once per generation a collective."""
        for ddp in self._instances:
            private.rebuild(ddp)
        self._note_rebuild(step)

    def settle_for(self, step: int) -> None:
        """After a fence: put every reducer into the state it had when `step` began. No communication."""
        self._note_rebuild(step)  # micro-batches: the second forward may have rebuilt without us
        if self._rebuilt_in == step:
            self.impose(self._before)
        self._reset()

    def describe(self) -> list[BucketLayout]:
        """The layouts in force."""
        return self._layouts

    def impose(self, layouts: list[BucketLayout]) -> None:
        """Take over these layouts. Raises LayoutMismatch when they belong to another model."""
        if len(layouts) != len(self._instances):
            raise LayoutMismatch(
                f"the source has {len(layouts)} DDP instances, "
                f"this rank {len(self._instances)}: build the same model on all ranks"
            )
        for ddp, mine, wanted in zip(self._instances, self._layouts, layouts, strict=True):
            if mine != wanted:
                private.impose(ddp, wanted)
                if private.layout(ddp) != wanted:
                    raise LayoutMismatch("a DDP instance did not take over the gradient buckets of the source")
        self._layouts, self._before, self._rebuilt_in = list(layouts), list(layouts), -1
        self._reset()

    def complete(self) -> None:
        """Nothing is owed: an optimizer step after DDP does not communicate."""

    def _note_rebuild(self, step: int) -> None:
        rebuilt = [private.is_rebuilt(ddp) for ddp in self._instances]
        if rebuilt == self._rebuilt:
            return
        self._rebuilt = rebuilt
        now = [private.layout(ddp) for ddp in self._instances]
        if now != self._layouts:
            self._before, self._layouts, self._rebuilt_in = self._layouts, now, step

    def _reset(self) -> None:
        for ddp in self._instances:
            private.reset(ddp)
        self._rebuilt = [False] * len(self._instances)
