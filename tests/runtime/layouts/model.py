"""Data and small models of the layouts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.runtime.programs import WIDTH, Net

__all__ = ["WIDTH", "Net", "batch", "regression"]


def batch(step: int, shard: int, shape: tuple[int, ...], micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of one step for one shard of the data; the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + 1_009 * shard + micro)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def regression(model: nn.Module) -> Callable[[int], torch.Tensor]:
    """Forward and backward of a step on this rank's own shard of the data, in one batch; the loss, detached."""
    rank = dist.get_rank()

    def run(step: int) -> torch.Tensor:
        x, y = batch(step, rank, (8, WIDTH))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return run
