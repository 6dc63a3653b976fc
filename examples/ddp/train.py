"""Plain data parallel training: a small classifier in DistributedDataParallel, a scheduler, clipped gradients.

    torchrun --nproc-per-node 2 plain.py --steps 100
    flashrec run --local --nodes 3 -- python train.py --steps 100

`plain.py` and `train.py` are the same script without and with recovery; docs/guides/ddp.md shows the difference.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flashrec

BATCH = 16


def spirals(num_samples: int) -> TensorDataset:
    """Points (num_samples, 2) on three noisy arms of a spiral, and which arm: made here, nothing to download."""
    generator = torch.Generator().manual_seed(1)
    arm = torch.randint(3, (num_samples,), generator=generator)
    radius = torch.rand(num_samples, generator=generator)
    angle = 4 * radius + arm * (2 * torch.pi / 3) + 0.2 * torch.randn(num_samples, generator=generator)
    return TensorDataset(torch.stack([radius * angle.sin(), radius * angle.cos()], dim=1), arm)


def train_step(step, model, optimizer, scheduler, batch):
    points, arm = batch
    loss = nn.functional.cross_entropy(model(points), arm)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    print(f"step {step} rank {dist.get_rank()} loss {loss.item():.9g}", flush=True)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps to take")
    options = parser.parse_args()

    flashrec.init()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    dataset = spirals(options.steps * BATCH * dist.get_world_size())
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset))
    session = flashrec.Session(model, optimizer, state={"scheduler": scheduler})
    data = session.data(loader)

    for step in session.steps(options.steps):
        with step:
            train_step(step, model, optimizer, scheduler, data.batch(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
