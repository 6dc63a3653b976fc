"""The vote of a step: all ranks count each other, after the gradients and before the optimizer.

If one rank has seen it complete, all ranks have entered it, so all hold complete gradients of the step and can finish
it alone. If nobody alive has seen it, nobody alive has applied the step. Without it, a loss at the wrong moment leaves
some ranks one step ahead with nobody able to say so.

Who wants a pause at the end of this step is counted, too. As all see the same sum, all pause, or nobody.

Gradients on the CPU are complete when backward returns: the vote goes over connections of our own (`tree`). On an
accelerator it is a collective of two numbers, which its stream puts after the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from flashrec.runtime.progress import Progress


class Counter(Protocol):
    """Among all ranks."""

    def count(self, step: int, is_pausing: bool) -> tuple[int, int]:
        """(ranks that have called this for `step`, those of them that want a pause). Raises RuntimeError: cut."""


class Vote:
    """Casts votes and keeps the tags."""

    def __init__(self, progress: Progress, world_size: int, counter: Callable[[], Counter]) -> None:
        """counter: called by all ranks before they vote; when it fails, this rank has not voted."""
        self._progress, self._world_size, self._counter = progress, world_size, counter

    def cast(self, step: int, wants_pause: bool = False) -> bool:
        """Vote for `step`. Returns whether some rank wants a pause. Raises RuntimeError when it was cut or counted
        short."""
        self._progress.where = "vote"
        counter = self._counter()
        self._progress.voted = step
        count, num_pausing = counter.count(step, wants_pause)
        if count != self._world_size:  # an aborted NCCL collective "succeeds"
            raise RuntimeError(f"ProcessGroup: the vote of step {step} counted {count} of {self._world_size} ranks")
        self._progress.passed = step
        return bool(num_pausing)


class AllReduce:
    """Counts with a collective. `device`: where the gradients are, so that the vote is ordered after them."""

    def __init__(self, device: torch.device) -> None:
        self._present = torch.tensor([1.0, 0.0], device=device)
        self._pausing = torch.tensor([1.0, 1.0], device=device)
        self._flags = torch.zeros(2, device=device)

    def count(self, step: int, is_pausing: bool) -> tuple[int, int]:
        self._flags.copy_(self._pausing if is_pausing else self._present)
        dist.all_reduce(self._flags)
        count, num_pausing = self._flags.tolist()
        return int(count), int(num_pausing)
