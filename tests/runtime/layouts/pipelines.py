"""torch.distributed.pipelining, alone and with several replicas of the whole pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.layouts.layout import Setup
from tests.runtime.layouts.model import WIDTH, batch
from tests.runtime.layouts.sharded import Middle

NUM_RANKS = 2  # of one pipeline
NUM_MICRO, MICRO = 4, 4  # micro-batches of a step, samples in each
WAYS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Chunk(nn.Module):
    """What one stage computes: random numbers are drawn, and a buffer counts the calls and has a part in the result."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.dropout(F.gelu(self.first(self.norm(x)))) * (1 + 0.01 * self.calls)
        return x + self.last(y)


def pp_dp_gpipe() -> Setup:
    """Gradients are averaged by hand; stages learn shapes from each other (which torch cannot do inside of DDP)."""
    return _build("gpipe", averages_by_hand=True)


def pp_dp_1f1b() -> Setup:
    return _build("1f1b", uses_ddp=True)


def pp_dp_interleaved() -> Setup:
    return _build("interleaved", uses_ddp=True, chunks_per_rank=2)


def pp() -> Setup:
    return _build("1f1b")


def pp_mirrored() -> Setup:
    setup = pp()
    return dataclasses.replace(setup, session={**setup.session, "mirrors": True})


def pp_hsdp() -> Setup:
    """Each stage sharded over two ranks, and that twice."""
    mesh = init_device_mesh("cpu", (2, 2, NUM_RANKS), mesh_dim_names=("replicate", "shard", "pp"))
    position = mesh["pp"].get_local_rank()
    torch.manual_seed(7 + position)
    chunk = Chunk()
    fully_shard(chunk, mesh=mesh["replicate", "shard"])
    example = torch.zeros(MICRO, WIDTH, requires_grad=True)
    stage = PipelineStage(
        chunk,
        position,
        NUM_RANKS,
        torch.device("cpu"),
        input_args=example if position else example.detach(),
        output_args=example,
        group=mesh["pp"].get_group(),
    )
    schedule = Schedule1F1B(stage, n_microbatches=NUM_MICRO, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=1e-2)

    def run(step: int) -> torch.Tensor:
        x, y = batch(step, dist.get_rank() // NUM_RANKS, (NUM_MICRO * MICRO, WIDTH))
        losses: list[torch.Tensor] = []
        schedule.step(*([] if position else [x]), **({"target": y, "losses": losses} if stage.is_last else {}))
        grads = [param.grad.to_local() for param in chunk.parameters()]
        return torch.stack(losses or [grad.square().sum() for grad in grads if grad.numel()]).mean().detach()

    return Setup(chunk, [optimizer], run, Middle(chunk.norm), session={"pipeline": schedule}, micro=chunk)


def _build(way: str, *, chunks_per_rank: int = 1, uses_ddp: bool = False, averages_by_hand: bool = False) -> Setup:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // NUM_RANKS, NUM_RANKS), mesh_dim_names=("dp", "pp"))
    pipeline, position, shard = mesh["pp"].get_group(), mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    replicas = mesh["dp"].get_group()
    chunks: list[nn.Module] = []
    stages = []
    num_stages = NUM_RANKS * chunks_per_rank
    for index in range(position, num_stages, NUM_RANKS):
        torch.manual_seed(7 + index)
        chunk: nn.Module = Chunk()
        shapes: dict[str, Any] = {}
        if uses_ddp:
            chunk = DistributedDataParallel(chunk, process_group=replicas, bucket_cap_mb=0.01)
            example = torch.zeros(MICRO, WIDTH, requires_grad=True)
            shapes = {"input_args": example if index else example.detach(), "output_args": example}
        chunks.append(chunk)
        stages.append(PipelineStage(chunk, index, num_stages, torch.device("cpu"), group=pipeline, **shapes))
    made: Callable[..., Any] = WAYS[way]
    schedule = made(stages if way == "interleaved" else stages[0], n_microbatches=NUM_MICRO, loss_fn=F.mse_loss)
    params = [param for chunk in chunks for param in chunk.parameters()]

    def run(step: int) -> torch.Tensor:
        x, y = batch(step, shard, (NUM_MICRO * MICRO, WIDTH))
        losses: list[torch.Tensor] = []
        inputs = [x] if position == 0 else []
        targets = {"target": y, "losses": losses} if stages[-1].is_last else {}
        schedule.step(*inputs, **targets)
        for param in params if averages_by_hand else ():
            dist.all_reduce(param.grad, group=replicas)
        # where no loss is known: what came back through the pipeline
        return torch.stack(losses).mean().detach() if losses else _squares(params)

    def clip() -> None:
        """By the norm over all stages."""
        total = _squares(params)
        dist.all_reduce(total, group=pipeline)
        for param in params:
            param.grad.mul_(0.5 / max(0.5, float(total.sqrt())))

    first = chunks[0].module if uses_ddp else chunks[0]
    session: dict[str, Any] = {"pipeline": schedule}
    if averages_by_hand:
        session["replicas"] = dist.get_process_group_ranks(replicas)
    return Setup(
        chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks),
        [torch.optim.AdamW(chunk.parameters(), lr=1e-2) for chunk in chunks],
        run,
        watched=first.first.weight,
        clip=clip,
        session=session,
        micro=first,
    )


def _squares(params: list[nn.Parameter]) -> torch.Tensor:
    return torch.stack([param.grad.square().sum() for param in params]).sum()
