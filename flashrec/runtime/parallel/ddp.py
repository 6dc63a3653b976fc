"""DDP: the gradient buckets must be the same on every rank, and the same as in an undisturbed run.

DDP starts with one layout and, after its first backward, rebuilds the buckets in the order in which gradients came
(rank 0 broadcasts). A replacement starts with the first layout and would issue other all-reduces: gloo then ends the
process. And a layout decides which elements share a ring chunk, so it decides the bits of the sums.

Therefore: (1) a due rebuild is done before the vote of the same step, so whoever passed a vote has rebuilt; (2) each
rank remembers the layout before its last rebuild, and goes back to it when that very step is done again; (3) the
source sends its layout and the target imposes it; (4) every rank resets its reducer, so that the next rebuild, which
is a collective, happens on all ranks in the same step.

Two kinds of reducer keep more, and get a new one instead of a reset:

* find_unused_parameters: a cut backward leaves behind which parameters it has used.
* static_graph: in the first iteration the reducer learns how often the hook of each parameter fires, and then issues
  other collectives than later. If that step is done again, it has to learn again. If it is over, a target has to be
  given what its predecessor has learnt (we count it ourselves, and all ranks keep the counts of all): it pretends, and
  all ranks end that backward together, with gradients of zero.

Buffers (batch norm) are those of rank 0: DDP broadcasts them in each forward. Rank 0 may be lost before that, so they
are broadcast before each vote, too. Then every rank that knows the result of a step has the buffers of that step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flashrec.runtime.errors import LayoutMismatch
from flashrec.runtime.parallel import ddp_support as support
from flashrec.runtime.snapshot import Stateful, freeze
from flashrec.runtime.torch_private import ddp as private


class DdpInstances:
    """All DDP instances inside one model, in module order. See `flashrec.runtime.parallel.part.Part`."""

    name = "ddp"

    def __init__(
        self,
        model: torch.nn.Module,
        spread: private.Spread | None = None,
        is_training: Callable[[], bool] = lambda: False,
    ) -> None:
        """spread: see `private.SharedBuffers`; in forwards it is used while `is_training`. Raises NotImplementedError
        for a DDP that cannot be recovered."""
        found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        for ddp in found:
            support.refuse(ddp)
        self._instances = [_Instance(ddp, spread, is_training) for ddp in found]

    def hook_states(self) -> dict[str, Stateful]:
        """State of communication hooks, to be kept and sent like what is registered with the session."""
        return {
            f"ddp {i} hook {j}": state
            for i, instance in enumerate(self._instances)
            for j, state in enumerate(instance.hook_states)
        }

    def open(self, step: int) -> None:
        """`step` begins. Raises RuntimeError when the script has changed what was checked."""
        for instance in self._instances:
            ddp = instance.ddp
            if private.use(ddp) != instance.use:
                instance.refuse_other_use()
            instance.opened, instance.syncs_buffers = step, ddp.require_forward_param_sync

    def before_vote(self, step: int) -> None:
        """Do the rebuild that the next forward would do (once per generation a collective), and share buffers."""
        for instance in self._instances:
            instance.before_vote(step)

    def settle_for(self, step: int) -> None:
        """After a fence: put every reducer into the state it had when `step` began. No communication."""
        for instance in self._instances:
            instance.settle_for(step)

    def describe(self) -> list[Any]:
        """What is in force, for each instance."""
        return [instance.describe() for instance in self._instances]

    def impose(self, described: list[Any]) -> None:
        """Take this over. Raises LayoutMismatch when it belongs to another model."""
        if len(described) != len(self._instances):
            raise LayoutMismatch(
                f"the source has {len(described)} DDP instances, "
                f"this rank {len(self._instances)}: build the same model on all ranks"
            )
        for instance, item in zip(self._instances, described, strict=True):
            instance.impose(*item)

    def complete(self) -> None:
        """What the reducers of static graphs have to learn together."""
        for instance in self._instances:
            instance.complete()


class _Instance:
    """One DDP and its reducer."""

    def __init__(self, ddp: Any, spread: private.Spread | None, is_training: Callable[[], bool]) -> None:
        self.ddp = ddp
        self.hook_states = support.hook_states(ddp)
        self.use = (*private.use(ddp)[:2], False)
        self._layout = self._before = private.layout(ddp)  # the layout before the last rebuild …
        self._rebuilt_in = -1  # … which happened in this step
        self._is_rebuilt = private.is_rebuilt(ddp)
        self.opened, self.syncs_buffers = -1, True  # at the start of that step
        self._buffers = private.SharedBuffers(ddp, spread)
        self._buffers.share_in_forward(is_training)
        self._first = private.FirstBackward(ddp) if ddp.static_graph else None
        self._usages: list[private.Usage] = []  # those that occur in the group, once the first iteration is over …
        self._usage_of: list[int] = []  # … and which one that of each rank is
        self._learnt_in = -1  # the step with the first iteration

    def before_vote(self, step: int) -> None:
        is_rebuilt, shares_buffers = private.rebuild(self.ddp)
        if is_rebuilt != self._is_rebuilt:
            self._note_rebuild(step)
        if self._first is not None and private.has_begun(self.ddp):
            self._usages, self._usage_of = self._gather(self._first.usage())
            self._first, self._learnt_in = None, step
        if shares_buffers:
            self._buffers.share()

    def refuse_other_use(self) -> None:
        hooks, _, is_joining = private.use(self.ddp)
        if is_joining:
            raise RuntimeError("join() for uneven inputs cannot be recovered: a rank without data does not vote")
        if hooks != self.use[0]:
            raise RuntimeError("register communication hooks of DDP before flashrec.Session(…) is created")
        raise RuntimeError("say static_graph=True when DDP is created")

    def settle_for(self, step: int) -> None:
        self._note_rebuild(step)  # micro-batches: the second forward may have rebuilt without us
        if self.opened == step:  # a cut inside of no_sync leaves it off
            self.ddp.require_forward_param_sync = self.syncs_buffers
        if self._learnt_in == step:
            self._usages, self._usage_of, self._learnt_in = [], [], -1
        is_back = self._rebuilt_in == step
        if is_back:
            self._take_layout(self._before)
        if is_back or self._keeps_more():
            self._recreate()
        else:
            private.reset(self.ddp)
        self._is_rebuilt = False

    def describe(self) -> list[Any]:
        return [self._layout, self.ddp.require_forward_param_sync, self._usages, self._usage_of]

    def impose(
        self, layout: private.BucketLayout, syncs_buffers: bool, usages: list[private.Usage], usage_of: list[int]
    ) -> None:
        is_other = layout != self._layout
        self._take_layout(layout)
        self.ddp.require_forward_param_sync = syncs_buffers
        self._usages, self._usage_of, self._learnt_in = usages, usage_of, -1
        if is_other or self._keeps_more() or self.ddp.static_graph:
            self._recreate()
            if private.layout(self.ddp) != layout:
                raise LayoutMismatch("a DDP instance did not take over the gradient buckets of the source")
        private.reset(self.ddp)
        self._is_rebuilt = False
        if usages:
            self._first = None
            private.pretend_first_backward(self.ddp, self._usage())

    def complete(self) -> None:
        if not self._usages:
            return
        kept = [freeze(state.state_dict()) for state in self.hook_states]
        private.reduce_nothing(self.ddp, [any(used) for used in zip(*self._used(), strict=True)])
        private.reset(self.ddp)
        for state, before in zip(self.hook_states, kept, strict=True):
            state.load_state_dict(before)

    def _keeps_more(self) -> bool:
        """The reducer of a cut step remembers more of it than a reset makes it forget."""
        if self.ddp.static_graph:
            return not self._usages
        return bool(self.ddp.find_unused_parameters)

    def _recreate(self) -> None:
        private.recreate(self.ddp, self._layout)
        if self.ddp.static_graph and not self._usages:
            if self._first is not None:
                self._first.usage()
            self._first = private.FirstBackward(self.ddp)

    def _take_layout(self, layout: private.BucketLayout) -> None:
        self._layout, self._before, self._rebuilt_in = layout, layout, -1

    def _note_rebuild(self, step: int) -> None:
        is_rebuilt = private.is_rebuilt(self.ddp)
        if is_rebuilt == self._is_rebuilt:
            return
        self._is_rebuilt = is_rebuilt
        now = private.layout(self.ddp)
        if now != self._layout:
            self._before, self._layout, self._rebuilt_in = self._layout, now, step

    def _used(self) -> list[list[bool]]:
        """Which parameters have a gradient, for each usage."""
        return [[has_gradient for _, has_gradient in usage] for usage in self._usages]

    def _usage(self) -> private.Usage:
        return self._usages[self._usage_of[dist.get_rank(self.ddp.process_group)]]

    def _gather(self, usage: private.Usage) -> tuple[list[private.Usage], list[int]]:
        """The usages that occur in the group, and the number of each rank's. A collective."""
        mine = torch.tensor([2 * count + used for count, used in usage], dtype=torch.int32, device=self.ddp.device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.ddp.process_group))]
        dist.all_gather(every, mine, group=self.ddp.process_group)
        rows = [tuple(row.tolist()) for row in every]
        distinct = list(dict.fromkeys(rows))
        usages = [[(value // 2, bool(value % 2)) for value in row] for row in distinct]
        return usages, [distinct.index(row) for row in rows]
