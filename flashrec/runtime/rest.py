"""The rest of an epoch, dealt out anew among more or fewer ranks.

A `DistributedSampler` deals an order of the epoch out like cards, and its ranks read at the same pace. So what all of
them have read before a step is the beginning of that order: one number. A world of another size deals the rest out in
the same way. Each sample of an epoch then comes once over any sequence of sizes, but for what the sampler itself adds
or drops so that all ranks get the same number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler


class Rest(NamedTuple):
    """From batch `number` on, of this rank: epoch `epoch` without its first `read` samples, then whole epochs."""

    number: int
    epoch: int
    read: int

    def batches(self, batch_sampler: Any) -> Iterator[list[int]]:
        """Those of this rank in the rest of the epoch."""
        sampler = batch_sampler.sampler
        order = _order(sampler, self.epoch)
        rest = order[self.read :]
        count = _share(sampler, self.read)
        padding = max(0, count * sampler.num_replicas - len(rest))
        rest += (order * math.ceil(padding / len(order)))[:padding]
        mine = rest[sampler.rank : count * sampler.num_replicas : sampler.num_replicas]
        return iter(BatchSampler(mine, batch_sampler.batch_size, batch_sampler.drop_last))

    def num_batches(self, batch_sampler: Any) -> int:
        count, size = _share(batch_sampler.sampler, self.read), int(batch_sampler.batch_size)
        return count // size if batch_sampler.drop_last else math.ceil(count / size)


def rigid(index_sampler: Any) -> str:
    """Why what this sampler yields cannot be dealt out anew; '': it can."""
    if type(index_sampler) is not BatchSampler:
        return f"{type(index_sampler).__name__} is not known to deal samples out by rank (a DistributedSampler is)"
    sampler: Any = index_sampler.sampler
    if type(sampler) is not DistributedSampler:
        return f"{type(sampler).__name__} is not known to deal samples out by rank (a DistributedSampler is)"
    return ""


def place(batch_sampler: Any, number: int, rest: Rest | None) -> tuple[int, int]:
    """(epoch, samples of it that all ranks together have read) before batch `number`."""
    sampler, size = batch_sampler.sampler, batch_sampler.batch_size
    epoch = read = 0
    if rest is not None:
        number, epoch, read = number - rest.number, rest.epoch, rest.read
        if number >= (length := rest.num_batches(batch_sampler)):
            number, epoch, read = number - length, epoch + 1, 0
    length = len(batch_sampler)
    if not read:
        epoch, number = epoch + number // length, number % length
    return epoch, read + number * size * sampler.num_replicas


def _share(sampler: DistributedSampler[Any], read: int) -> int:
    """Samples of each rank after the first `read` of an epoch."""
    left = len(sampler.dataset) - read  # type: ignore[arg-type]
    return left // sampler.num_replicas if sampler.drop_last else math.ceil(left / sampler.num_replicas)


def _order(sampler: DistributedSampler[Any], epoch: int) -> list[int]:
    """All samples of the epoch, as they are dealt out."""
    alone = copy.copy(sampler)
    alone.rank, alone.num_replicas = 0, 1
    alone.num_samples = alone.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    alone.set_epoch(epoch)
    return list(alone)
