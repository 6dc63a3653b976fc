"""DistributedDataParallel, with batch norm (or none), dropout and a scheduler."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.layouts.layout import Setup
from tests.runtime.layouts.model import Net, regression


def build() -> Setup:
    torch.manual_seed(7)
    return _setup(Net())


def without_buffers() -> Setup:
    """Nothing that DDP would broadcast in a forward."""
    torch.manual_seed(7)
    net: Any = Net()
    net.norm = nn.LayerNorm(net.norm.num_features)
    return _setup(net)


def _setup(net: Net) -> Setup:
    model = DistributedDataParallel(net, bucket_cap_mb=0.04)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    run = regression(model)

    return Setup(
        model,
        [optimizer],
        run,
        watched=net.blocks[1][0].weight,
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        state={"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)},
    )
