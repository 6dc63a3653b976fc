"""FSDP2 and HSDP: every `fully_shard` module must begin a step sharded, with nothing half gathered or half reduced.

A step that is cut in forward or backward leaves parameters gathered, prefetches that nobody will wait for, and
gradients of micro-batches on gathered parameters or in partial sums. Doing the step again on top of that issues other
collectives than a replacement does, or adds the old gradients to the new ones. So all of it is dropped.

Scripts switch communication off and on between micro-batches (`set_requires_gradient_sync`, `set_is_last_backward`,
…): these flags go back to where they were when the step began, and a replacement takes over those of its source. There
is nothing else that a first step leaves behind: the first forward finds out which module is the root, without
communication, and the collectives of a step do not depend on earlier ones.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from flashrec.runtime.errors import LayoutMismatch
from flashrec.runtime.torch_private import fsdp as private
from flashrec.runtime.torch_private.fsdp import Flags

_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
logger = logging.getLogger("flashrec.runtime")


class FsdpModules:
    """All `fully_shard` modules inside one model. See `flashrec.runtime.parallel.part.Part`.

    It is also an object with state_dict() and load_state_dict(), whose state are the flags: a `Snapshot` keeps them.
    """

    name = "fsdp"

    def __init__(self, model: torch.nn.Module) -> None:
        """Raises UnsupportedTorch."""
        self._states = private.states(model)
        if names := _own_statistics(model):
            logger.warning(
                "running statistics of %s (%d modules) are not the same on all ranks in FSDP: a replacement gets those "
                "of its source; use SyncBatchNorm if they matter",
                names[0],
                len(names),
            )
        self._settle()  # an evaluation before the first step leaves the root gathered

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced; with an offload policy parameters are elsewhere."""
        return private.device(self._states[0][1])

    def settle_for(self, step: int) -> None:
        """The flags are put back by the snapshot."""
        self._settle()

    def describe(self) -> list[tuple[str, Flags]]:
        """Module names and their flags."""
        return [(name, private.flags(state)) for name, state in self._states]

    def impose(self, described: list[tuple[str, Flags]]) -> None:
        """Take over the flags. Raises LayoutMismatch when other modules are sharded, or in other groups."""
        for (name, flags), (mine, state) in zip(described, self._states, strict=False):
            if (name, len(flags)) != (mine, len(private.flags(state))):
                raise LayoutMismatch(f"the source called fully_shard for module {name!r}, this rank for {mine!r}")
        if len(described) != len(self._states):
            raise LayoutMismatch(
                f"the source called fully_shard for {len(described)} modules, this rank for {len(self._states)}: "
                "build the same model on all ranks"
            )
        self._settle()
        self._set_flags([flags for _, flags in described])

    def complete(self) -> None:
        """Nothing is owed: an optimizer step on sharded parameters does not communicate."""

    def state_dict(self) -> dict[str, Any]:
        return {"flags": tuple(private.flags(state) for _, state in self._states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._set_flags(state["flags"])

    def _set_flags(self, wanted: Any) -> None:
        for (_, state), flags in zip(self._states, wanted, strict=True):
            private.set_flags(state, flags)

    def _settle(self) -> None:
        private.settle([state for _, state in self._states])


def _own_statistics(model: torch.nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BATCH_NORMS) and module.running_mean is not None
    ]


def is_used(model: torch.nn.Module) -> bool:
    """Does `model` contain a `fully_shard` module? Imports nothing: who uses it has imported it.

    Raises NotImplementedError for the first FSDP, which keeps its shards in another way.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return False
    if any(isinstance(each, module.FullyShardedDataParallel) for each in model.modules()):
        raise NotImplementedError("FullyShardedDataParallel (FSDP1) cannot be recovered; use fully_shard (FSDP2)")
    return any(isinstance(each, module.FSDPModule) for each in model.modules())
