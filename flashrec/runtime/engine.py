"""The seam behind which process groups are made usable again.

Two rules hold for every engine: after `unblock` each collective of the old generation ends promptly, and a later one
raises at once instead of blocking. An engine keeps the group *objects*: DDP and DeviceMesh hold them.

`inplace` replaces the backend inside the group, `native` connects it again (from torch 2.14 on); nothing above this
module knows which is at work. tests/runtime/engines is one suite for both, docs/decisions/0022-two-engines.md says why.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from flashrec.runtime.torch_private import groups as private


@dataclass(frozen=True)
class Group:
    """One process group of this rank, as the script asked for it."""

    name: str
    ranks: tuple[int, ...]  # global ranks, in group order
    group_rank: int
    backend: str  # what the script said: 'gloo', 'nccl', 'cpu:gloo,cuda:nccl', 'undefined'
    timeout: timedelta
    options: Any
    reference: weakref.ref[dist.ProcessGroup]  # weak: the script may destroy its groups, and that shall free them

    @property
    def handle(self) -> dist.ProcessGroup:
        """The group object. Raises RuntimeError when the script has destroyed it."""
        found = self.reference()
        if found is None:
            raise RuntimeError(f"process group {self.name} was destroyed")
        return found

    @property
    def is_alive(self) -> bool:
        found = self.reference()
        return found is not None and private.is_alive(found)

    @property
    def size(self) -> int:
        return len(self.ranks)


class Engine(Protocol):
    """Makes groups work in a generation."""

    def form(self, groups: list[Group], generation: int, timeout_s: float) -> None:
        """Connect all `groups` for `generation`. Raises Superseded, WaitedTooLong, RuntimeError."""

    def unblock(self, groups: list[Group]) -> int:
        """End every collective of every older generation. Called from the control thread. Returns what was cut."""

    def drain(self, timeout_s: float) -> None:
        """After `form`: return when no operation of an older generation can write into a tensor any more. Those that
        were queued behind the one that was cut end a little later than it. Raises NotUnblockable."""
