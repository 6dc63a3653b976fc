"""An optimizer whose step is shared out: each rank of a group orthogonalises some of the matrices, then all exchange
what they have found (as Muon is used in practice). Vectors are left to AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.layouts.layout import Setup
from tests.runtime.layouts.model import Net, regression


class ShardedMuon(torch.optim.Optimizer):
    """group: the ranks that share the work. shards_state: a rank keeps the momentum of its own matrices only."""

    def __init__(
        self, params: list[nn.Parameter], group: dist.ProcessGroup, *, lr: float = 0.02, shards_state: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})
        self._group, self._shards_state = group, shards_state
        self.visitors: list[Callable[[], object]] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for first in range(0, len(params), size):
                chunk = params[first : first + size]
                longest = max(param.numel() for param in chunk)
                mine = torch.zeros(longest)
                for place, param in enumerate(chunk):
                    if place == rank or not self._shards_state:
                        direction = self._accumulate(param, group["momentum"])
                        if place == rank:
                            mine[: param.numel()] = orthogonal(direction).reshape(-1)
                everybody = torch.empty(size * longest)
                dist.all_gather_into_tensor(everybody, mine, group=self._group)
                for param, found in zip(chunk, everybody.reshape(size, longest), strict=False):
                    param.add_(found[: param.numel()].view_as(param), alpha=-group["lr"])
                for visit in self.visitors if first == size else ():
                    visit()

    def _accumulate(self, param: nn.Parameter, momentum: float) -> torch.Tensor:
        state = self.state[param]
        if not state:
            state["momentum_buffer"], state["count"] = torch.zeros_like(param), 0
        state["momentum_buffer"].lerp_(param.grad, 1 - momentum)
        state["count"] += 1
        return param.grad.lerp(state["momentum_buffer"], momentum)


def orthogonal(matrix: torch.Tensor, num_iterations: int = 5) -> torch.Tensor:
    """About U V^T of the singular value decomposition U S V^T, by Newton-Schulz with a quintic polynomial."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def replicated_state() -> Setup:
    """All four ranks share the work, and all hold all momenta."""
    session = {"optimizer_communicates": True, "replicas": range(dist.get_world_size())}
    return _build(dist.group.WORLD, shards_state=False, session=session)


def sharded_state() -> Setup:
    """Two pairs: the work and the momenta are shared out within a pair."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = dist.get_process_group_ranks(mesh["replicate"].get_group())
    session = {"optimizer_communicates": True, "replicas": replicas}
    return _build(mesh["shard"].get_group(), shards_state=True, session=session)


def _build(group: dist.ProcessGroup, *, shards_state: bool, session: dict[str, object]) -> Setup:
    torch.manual_seed(7)
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.04)
    muon = ShardedMuon([param for param in model.parameters() if param.ndim == 2], group, shards_state=shards_state)
    adam = torch.optim.AdamW([param for param in model.parameters() if param.ndim < 2], lr=1e-2)

    run = regression(model)

    return Setup(
        model,
        [muon, adam],
        run,
        watched=net.blocks[1][0].weight,
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        state={"scheduler": torch.optim.lr_scheduler.StepLR(muon, 2, 0.5)},
        session=session,
        between_collectives=muon.visitors,
    )
