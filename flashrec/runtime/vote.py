"""The vote of a step: a two-element all-reduce over all ranks, after the gradients and before the optimizer.

If one rank has seen it complete, all ranks have entered it, so all hold complete gradients of the step and can finish
it alone. If nobody alive has seen it, nobody alive has applied the step. Without it, a loss at the wrong moment leaves
some ranks one step ahead with nobody able to say so.

The second element counts who wants a pause at the end of this step. As all see the same sum, all pause, or nobody.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from flashrec.runtime.progress import Progress


class Vote:
    """Casts votes and keeps the tags. `device`: where the gradients are, so that the vote is ordered after them."""

    def __init__(self, progress: Progress, world_size: int, device: torch.device) -> None:
        self._progress, self._world_size = progress, world_size
        self._present = torch.tensor([1.0, 0.0], device=device)
        self._pausing = torch.tensor([1.0, 1.0], device=device)
        self._flags = torch.zeros(2, device=device)

    def cast(self, step: int, wants_pause: bool = False) -> bool:
        """Vote for `step`. Returns whether some rank wants a pause. Raises RuntimeError when it was cut or counted
        short."""
        self._progress.where, self._progress.voted = "vote", step
        self._flags.copy_(self._pausing if wants_pause else self._present)
        dist.all_reduce(self._flags)
        # An aborted NCCL collective "succeeds": only the sum says that everybody was there.
        count, num_pausing = self._flags.tolist()
        if count != self._world_size:
            raise RuntimeError(f"ProcessGroup: the vote of step {step} counted {count:g} of {self._world_size} ranks")
        self._progress.passed = step
        return bool(num_pausing)
