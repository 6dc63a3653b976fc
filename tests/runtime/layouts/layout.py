"""Layouts: how a small model is spread over the ranks, in the words that users of torch would use.

Each layout lives in a module of its own with a function `build() -> Setup`, called on every rank after
`init_process_group`, and knows nothing about faults. `TABLE` names them all; modules are imported where they run, so
that the fork server does not load what most tests do not need.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn


class Watched(Protocol):
    """A parameter, or what stands for one."""

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> object: ...


@dataclass
class Setup:
    """What one rank trains with."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    run: Callable[[int], torch.Tensor]  # forward and backward of one step, all micro-batches; the loss, detached
    watched: Watched  # its gradient comes in the middle of the backward
    clip: Callable[[], object] = lambda: None  # after the backward
    state: dict[str, Any] = field(default_factory=dict)  # for Session(state=…); what has step() is stepped at the end
    session: dict[str, Any] = field(default_factory=dict)  # more arguments of Session
    between_collectives: list[Callable[[], object]] | None = None  # called so by the first optimizer, if it has several
    micro: nn.Module | None = None  # runs once forward for each micro-batch, where there are several


@dataclass(frozen=True)
class Layout:
    """A row of the table. protected: a lost rank has a replica; reason: why not. groups: ranks that hold the same
    shards, written down by hand so that what the runtime finds can be held against it; (): all ranks hold the same, or,
    with a reason, each its own. worlds: world sizes that it can be built for, `world_size` if none are named."""

    name: str
    world_size: int
    module: str
    function: str = "build"
    reason: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    worlds: tuple[int, ...] = ()
    is_mirrored: bool = False  # each rank holds its own, and its holder a mirror of it
    cells: tuple[tuple[int, str], ...] = ((3, "backward"), (2, "in-optimizer"))  # (step, place) of the ordinary suite

    @property
    def is_protected(self) -> bool:
        return not self.reason

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.worlds or (self.world_size,)

    def replica_groups(self, world_size: int) -> tuple[frozenset[int], ...]:
        """What must not be lost as a whole."""
        if self.groups:
            return tuple(map(frozenset, self.groups))
        everybody = range(world_size)
        alone = self.reason or self.is_mirrored
        return tuple(frozenset([rank]) for rank in everybody) if alone else (frozenset(everybody),)

    def build(self) -> Setup:
        module = importlib.import_module(f"tests.runtime.layouts.{self.module}")
        setup: Setup = getattr(module, self.function)()
        return setup


_STATIC = ((0, "before-vote"), (0, "between"), (3, "backward"))  # as it learns, once it has learnt, later

TABLE = {
    layout.name: layout
    for layout in (
        Layout("ddp", 3, "plain_ddp", worlds=(2, 3, 4)),
        Layout("ddp_static", 2, "ddp_forms", "static", worlds=(2, 3), cells=_STATIC),
        Layout("ddp_unused", 2, "ddp_forms", "unused", worlds=(2, 3), cells=((3, "backward"),)),
        Layout("ddp_no_sync", 2, "ddp_forms", "no_sync", worlds=(2, 3), cells=((1, "micro-2"),)),
        Layout("ddp_hooks", 2, "ddp_forms", "hooks", worlds=(2, 3), cells=((3, "backward"),)),
        Layout("ddp_compiled", 2, "ddp_forms", "compiled", worlds=(2, 3), cells=()),
        Layout("pp_dp_gpipe", 4, "pipelines", "pp_dp_gpipe", groups=((0, 2), (1, 3)), cells=()),
        Layout("pp_dp_1f1b", 4, "pipelines", "pp_dp_1f1b", groups=((0, 2), (1, 3)), cells=((3, "micro-3"),)),
        Layout("pp_dp_interleaved", 4, "pipelines", "pp_dp_interleaved", groups=((0, 2), (1, 3)), cells=()),
        Layout("zero1", 3, "zero1", "over_all", reason="optimizer state is not replicated", worlds=(2, 3, 4)),
        Layout("zero1_grouped", 4, "zero1", "grouped", groups=((0, 2), (1, 3)), cells=()),
        Layout("zero1_views", 4, "zero1", "grouped_views", groups=((0, 2), (1, 3)), cells=()),
        Layout("muon_sharded_step", 4, "muon", "replicated_state", worlds=(2, 3, 4), cells=()),
        Layout("muon_sharded_state", 4, "muon", "sharded_state", groups=((0, 2), (1, 3)), cells=()),
        Layout("moe_ep", 4, "moe", "expert_parallel", groups=((0, 2), (1, 3)), cells=((3, "backward"),)),
        Layout("pp_hsdp", 8, "pipelines", "pp_hsdp", groups=((0, 4), (1, 5), (2, 6), (3, 7)), cells=()),
        Layout("pp", 2, "pipelines", "pp", reason="a pipeline alone: no rank holds what another one does"),
        Layout("hsdp", 4, "sharded", "hsdp", groups=((0, 2), (1, 3)), cells=((3, "backward"),)),
        Layout("hsdp_bf16", 4, "sharded", "hsdp_bf16", groups=((0, 2), (1, 3)), cells=()),
        Layout("hsdp_accumulate", 4, "sharded", "hsdp_accumulate", groups=((0, 2), (1, 3)), cells=()),
        Layout("hsdp_offload", 4, "sharded", "hsdp_offload", groups=((0, 2), (1, 3)), cells=()),
        Layout("hsdp_compiled", 4, "sharded", "hsdp_compiled", groups=((0, 2), (1, 3)), cells=()),
        Layout("tp", 4, "sharded", "tp", groups=((0, 2), (1, 3)), cells=()),
        Layout("hsdp_tp", 8, "sharded", "hsdp_tp", groups=((0, 4), (1, 5), (2, 6), (3, 7)), cells=()),
        Layout("zero1_mirrored", 3, "zero1", "over_all_mirrored", worlds=(2, 3, 4), is_mirrored=True, cells=()),
        Layout("fsdp2_mirrored", 2, "sharded", "fsdp2_mirrored", worlds=(2, 4), is_mirrored=True, cells=()),
        Layout("pp_mirrored", 2, "pipelines", "pp_mirrored", is_mirrored=True, cells=()),
        Layout("fsdp2", 2, "sharded", "fsdp2", reason="FSDP alone: each shard exists once", worlds=(2, 4), cells=()),
    )
}  # fmt: skip
