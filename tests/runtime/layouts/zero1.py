"""ZeRO-1: DDP over all ranks, the optimizer's state spread over all of them, or over each half."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.layouts.layout import Setup
from tests.runtime.layouts.model import Net, regression


def over_all() -> Setup:
    return _build(None, has_views=False)


def over_all_mirrored() -> Setup:
    return dataclasses.replace(_build(None, has_views=False), session={"mirrors": True})


def grouped() -> Setup:
    """Two nodes with two ranks each: what a rank holds, its counterpart on the other node holds, too."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _build(mesh["shard"].get_group(), has_views=False)


def grouped_views() -> Setup:
    """As `grouped`, with groups as `new_subgroups` makes them and parameters that are views of buckets."""
    group, _ = dist.new_subgroups(2)
    return _build(group, has_views=True)


def _build(group: dist.ProcessGroup | None, *, has_views: bool) -> Setup:
    torch.manual_seed(7)
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.04)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, group, parameters_as_bucket_view=has_views, lr=1e-2
    )
    visitors: list = []
    broadcast = optimizer._broadcast_params_from_rank

    def broadcast_and_visit(source: int) -> list[dist.Work]:
        work = broadcast(source)
        if source == 0:
            for visit in visitors:
                visit()
        return work

    optimizer._broadcast_params_from_rank = broadcast_and_visit

    run = regression(model)

    return Setup(
        model,
        [optimizer],
        run,
        watched=net.blocks[1][0].weight,
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        state={"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)},
        between_collectives=visitors,
    )
