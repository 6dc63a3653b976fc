"""A training that goes on in worlds of other sizes, as small as can be.

The layout is 'ddp', or 'hsdp' (replicas of two shards). The learning rate follows the world size. Each rank appends
what it has done to OUT/rank-R, one line a step that counts: world size, loss, samples; at the end a digest of its
state. A checkpoint is kept of every step, so that a test can start another world from any of them. In worlds smaller
than FULL ranks a step takes SLOW seconds more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import flashrec

SAMPLES, BATCH = 50, 2  # of an epoch; of a batch


class Numbers(Dataset[Any]):
    """Sample i, with some noise as augmentation has it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        return i, torch.full((16,), i / SAMPLES) + torch.randn(16)


def build(layout: str) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    if layout == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.001)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for value in [*model.state_dict().values(), *(v for entry in optimizer.state.values() for v in entry.values())]:
        local = value.to_local() if isinstance(value, DTensor) else value
        found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def main(out: Path, kept: Path, layout: str, steps: int, slow: float, full: int) -> None:
    flashrec.init()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    session = flashrec.Session(model, optimizer, state={"scheduler": scheduler})
    numbers = Numbers()
    data = session.data(DataLoader(numbers, batch_size=BATCH, sampler=DistributedSampler(numbers, seed=3)))
    out.mkdir(parents=True, exist_ok=True)
    said = (out / f"rank-{rank}").open("a")

    def say(**what: Any) -> None:
        life = int(os.environ.get("FLASHREC_INCARNATION", "1"))
        print(json.dumps({"world": size, "life": life, **what}), file=said, flush=True)

    @session.on_resize
    def scale(old: int, new: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= new / old
        scheduler.base_lrs = [rate * new / old for rate in scheduler.base_lrs]
        say(resized=[old, new])

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict()}

    def save(folder: Path, group: dist.ProcessGroup | None) -> None:
        dcp.save(state(), checkpoint_id=folder, process_group=group)

    def load(folder: Path) -> None:
        found = state()
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        scheduler.load_state_dict(found["scheduler"])

    session.checkpoint(kept, save=save, load=load, every=1, keep=10_000)
    results: dict[int, dict[str, Any]] = {}

    @session.on_commit
    def committed(step: int) -> None:
        say(step=step, **results.pop(step))

    for step in session.steps(steps):
        with step:
            samples, inputs = data.batch(step)
            loss = model(inputs).square().mean()
            loss.backward()
            results[int(step)] = {"loss": loss.item().hex(), "samples": samples.tolist()}
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if size < full:
            time.sleep(slow)
    say(step=steps, loss=digest_of(model, optimizer), samples=[])
    dist.destroy_process_group()


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kept", type=Path, required=True)
parser.add_argument("--layout", choices=["ddp", "hsdp"], default="ddp")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--slow", type=float, default=0.0)
parser.add_argument("--full", type=int, default=0)
main(**vars(parser.parse_args()))
