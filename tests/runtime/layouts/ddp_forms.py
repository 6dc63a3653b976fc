"""DistributedDataParallel with what it can be asked for: each form keeps something else in its reducer."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.runtime.layouts.layout import Setup
from tests.runtime.layouts.model import WIDTH, Net, batch, regression


def _setup(model: nn.Module, net: Net | Wide, **more: Any) -> Setup:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    run = regression(model)

    return Setup(model, [optimizer], **({"run": run, "watched": net.blocks[1][0].weight} | more))


class Recomputed(Net):
    """One block is run twice, in two backwards inside of the backward; one layer is never used, one by some ranks."""

    def __init__(self, is_odd: bool) -> None:
        super().__init__()
        self.is_odd = is_odd
        self.unused, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(4 * WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in (self.blocks[0], self.blocks[1], self.blocks[1], self.blocks[2]):
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.last(x + self.sometimes(x) if self.is_odd else x)


def static() -> Setup:
    torch.manual_seed(7)
    net = Recomputed(dist.get_rank() % 2 == 1)
    return _setup(DistributedDataParallel(net, bucket_cap_mb=0.04, static_graph=True), net)


class Sparse(Net):
    """Which blocks take part depends on the step and the rank; the last one is used by nobody in every third step."""

    route = (0, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step, shard = self.route
        x = self.norm(self.first(x))
        for i, block in enumerate(self.blocks):
            if i == 1 or (i == 0 and (step + shard) % 2) or (i == 2 and step % 3):
                x = x + block(x)
        return self.last(x)


def unused() -> Setup:
    torch.manual_seed(7)
    net = Sparse()
    model = DistributedDataParallel(net, bucket_cap_mb=0.04, find_unused_parameters=True)
    rank = dist.get_rank()

    def run(step: int) -> torch.Tensor:
        x, y = batch(step, rank, (8, WIDTH))
        net.route = (step, rank)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return _setup(model, net, run=run)


def no_sync() -> Setup:
    torch.manual_seed(7)
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.04)
    rank, num_micro = dist.get_rank(), 3

    def run(step: int) -> torch.Tensor:
        total = torch.zeros(())
        for micro in range(num_micro):
            x, y = batch(step, rank, (8, WIDTH), micro)
            with model.no_sync() if micro < num_micro - 1 else contextlib.nullcontext():
                loss = F.mse_loss(model(x), y) / num_micro
                loss.backward()
            total += loss.detach()
        return total

    return _setup(model, net, run=run, micro=model)


def bf16(state, bucket):  # torch refuses annotations that are text
    """torch refuses its own hook by name where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


class Fading:
    """State of a communication hook: the gradients of each later bucket weigh a little less."""

    def __init__(self) -> None:
        self.weight = torch.ones(())

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"].clone()


def fade(state, bucket):
    state.weight = state.weight * 0.99
    buffer = bucket.buffer().mul_(state.weight / dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


def hooks() -> Setup:
    """Two instances in one model, each with a hook, one with state."""
    torch.manual_seed(7)
    net, head = Net(), nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    body = DistributedDataParallel(net, bucket_cap_mb=0.04, gradient_as_bucket_view=True)
    body.register_comm_hook(None, bf16)
    tail = DistributedDataParallel(head, bucket_cap_mb=0.02)
    tail.register_comm_hook(Fading(), fade)
    return _setup(nn.Sequential(body, tail), net)


class Wide(nn.Module):
    """More than the MiB at which torch.compile splits a DDP model into one graph for each bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 320), nn.BatchNorm1d(320)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(320, 320), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)])
        self.last = nn.Linear(320, WIDTH)

    forward = Net.forward


def _announcing(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    print("a graph is compiled", file=sys.stderr, flush=True)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def compiled() -> Setup:
    torch.manual_seed(7)
    net = Wide()
    return _setup(torch.compile(DistributedDataParallel(net, bucket_cap_mb=1), backend=_announcing), net)
