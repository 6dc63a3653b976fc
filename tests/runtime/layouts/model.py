"""Data and small models of the layouts."""

from __future__ import annotations

import torch

from tests.runtime.programs import WIDTH, Net

__all__ = ["WIDTH", "Net", "batch"]


def batch(step: int, shard: int, shape: tuple[int, ...], micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of one step for one shard of the data; the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + 1_009 * shard + micro)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
