"""ZeRO-1: `ZeroRedundancyOptimizer`, whose state is spread over a process group, each parameter's on one rank.

Its `step()` updates the parameters that are this rank's with an inner optimizer and broadcasts them to the group. The
state is the inner optimizer's (`zero.optim.state`); hyper-parameters are kept equal inside and outside by torch at each
step. Which rank owns which parameter follows from their sizes alone, so a replacement finds the same by itself; that
it did is checked when it is restored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from flashrec.runtime.errors import LayoutMismatch
from flashrec.runtime.parallel.replicas import Piece


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """The state that `optimizer` works with: parameter -> its entries, for the parameters that this rank updates."""
    found: dict[Any, Any] = optimizer.optim.state if is_zero(optimizer) else optimizer.state  # type: ignore[attr-defined]
    return found


def counterparts(group: tuple[int, ...], rank: int, world_size: int) -> tuple[int, ...]:
    """Ranks at the place of `rank` in groups like `group`, of which the others are made by shifting it.

    That is how groups of a DeviceMesh and of `dist.new_subgroups` lie: places that are `stride` apart. A group that
    does not lie so has no counterparts that we know of: (rank,).
    """
    size, place = len(group), group.index(rank)
    stride = group[1] - group[0] if size > 1 else 1
    is_regular = group == tuple(range(group[0], group[0] + size * stride, stride))
    if not is_regular or world_size % (size * stride) or (group[0] // stride) % size:
        return (rank,)
    return tuple(other for other in range(world_size) if (other // stride) % size == place)


class ZeroOptimizers:
    """All ZeRO optimizers of a session. See `flashrec.runtime.parallel.part.Part`, and `Holder` beside `replicas`."""

    name = "zero"

    def __init__(self, optimizers: list[torch.optim.Optimizer], rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._optimizers: list[Any] = [optimizer for optimizer in optimizers if is_zero(optimizer)]
        for optimizer in self._optimizers:
            if optimizer._overlap_with_ddp:
                raise NotImplementedError(
                    "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates parameters during the backward, which "
                    "cannot be recovered; leave it off"
                )

    def held_by(self) -> Iterator[Piece]:
        """The optimizer state of this rank's parameters. That the counterparts hold the same is checked in `impose`."""
        for optimizer in self._optimizers:
            group = tuple(dist.get_process_group_ranks(optimizer.process_group))
            ranks = counterparts(group, self._rank, self._world_size)
            yield Piece(
                "this rank's part of the state of ZeroRedundancyOptimizer",
                ranks,
                f"it is spread over ranks {', '.join(map(str, group))} (process_group=)",
            )

    def settle_for(self, step: int) -> None:
        """Nothing is kept from step to step."""

    def describe(self) -> list[list[int]]:
        """Of each optimizer: which of its parameters are this rank's, by number."""
        return [_owned(optimizer) for optimizer in self._optimizers]

    def impose(self, described: list[list[int]]) -> None:
        if described != self.describe():
            raise LayoutMismatch(
                "the source holds the optimizer state of other parameters than this rank: its place in the "
                "process_group= of ZeroRedundancyOptimizer is another one. Check the `replicas` of the Session"
            )

    def complete(self) -> None:
        """An update that was cut is undone, so it owes nothing."""


def _owned(zero: Any) -> list[int]:
    number = {id(param): i for i, param in enumerate(p for group in zero.param_groups for p in group["params"])}
    return [number[id(param)] for group in zero.optim.param_groups for param in group["params"]]
