"""A mixture of experts: tokens travel to the rank of their expert and back, in forward and backward. Each expert is on
the ranks of one column of a mesh; what is not an expert is on all ranks, in DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.layouts.layout import Setup
from tests.runtime.layouts.model import batch

WIDTH, EXPERTS_PER_RANK, NUM_TOKENS = 16, 2, 32


class Front(nn.Module):
    """What comes before the experts: features of each token, and how well each expert fits it."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.embed, self.drop, self.gate = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, num_experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.drop(F.gelu(self.embed(x)))
        return hidden, self.gate(hidden).softmax(-1)


class Moe(nn.Module):
    def __init__(self, ep: dist.ProcessGroup) -> None:
        super().__init__()
        self._ep, size = ep, dist.get_world_size(ep)
        torch.manual_seed(7)
        self.front = DistributedDataParallel(Front(size * EXPERTS_PER_RANK))
        self.back = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
        torch.manual_seed(70 + dist.get_rank(ep))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS_PER_RANK)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, fits = self.front(x)
        weight, expert = fits.max(-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=fits.shape[1])
        theirs = torch.empty_like(counts)  # tokens that each rank has for each of our experts
        dist.all_to_all_single(theirs, counts, group=self._ep)
        sent, received = (c.reshape(-1, EXPERTS_PER_RANK).sum(1).tolist() for c in (counts, theirs))
        tokens = self._exchange(hidden[order], sent, received)
        of_expert = torch.arange(EXPERTS_PER_RANK).repeat(len(received)).repeat_interleave(theirs)
        done = torch.zeros_like(tokens)
        for number, module in enumerate(self.experts):
            rows = (of_expert == number).nonzero()[:, 0]
            done = done.index_add(0, rows, module(tokens[rows]))
        back = self._exchange(done, received, sent)
        return self.back(hidden + torch.zeros_like(hidden).index_add(0, order, back) * weight[:, None])

    def _exchange(self, tokens: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        into = tokens.new_empty(sum(received), tokens.shape[1])
        return all_to_all_single(into, tokens, received, sent, group=self._ep)


def expert_parallel() -> Setup:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    dp, rank = mesh["dp"].get_group(), dist.get_rank()
    model = Moe(mesh["ep"].get_group())
    experts = list(model.experts.parameters())
    dense = [*model.front.parameters(), *model.back.parameters()]
    optimizer = torch.optim.AdamW([{"params": dense}, {"params": experts, "lr": 2e-2}], lr=1e-2)

    def run(step: int) -> torch.Tensor:
        x, y = batch(step, rank, (NUM_TOKENS, WIDTH))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for param in experts:
            dist.all_reduce(param.grad, group=dp)
            param.grad /= dist.get_world_size()
        return loss.detach()

    return Setup(
        model,
        [optimizer],
        run,
        watched=model.front.module.gate.weight,
        clip=lambda: nn.utils.clip_grad_norm_(dense, 1.0),
        state={"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)},
        session={"replicas": dist.get_process_group_ranks(dp)},
    )
