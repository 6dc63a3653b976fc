"""DistributedDataParallel, with batch norm, dropout and a scheduler."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.layouts.layout import Setup
from tests.runtime.layouts.model import WIDTH, Net, batch


def build() -> Setup:
    torch.manual_seed(7)
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.04)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank = dist.get_rank()

    def run(step: int) -> torch.Tensor:
        x, y = batch(step, rank, (8, WIDTH))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return Setup(
        model,
        [optimizer],
        run,
        watched=net.blocks[1][0].weight,
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        state={"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)},
    )
