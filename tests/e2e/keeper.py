"""A training with checkpoints, as small as can be: `keeper.py CHECKPOINTS OUT STEPS REPLICAS [DIE_SAVING]`.

fully_shard over two ranks, as two shards (REPLICAS 1) or two replicas (2), saved by torch.distributed.checkpoint every
third step. Each rank appends the loss of each step that counts to OUT, and at the end a digest of its state. It runs
without `flashrec run`, too. DIE_SAVING: the first life of rank 1 ends in the middle of the checkpoint of this step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flashrec


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    values = [*model.state_dict().values(), *(v for entry in optimizer.state.values() for v in entry.values())]
    for value in values:
        local = value.to_local() if isinstance(value, DTensor) else value
        found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def main(checkpoints: Path, out: Path, steps: int, replicas: int, die_saving: int = -1) -> None:
    flashrec.init()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, life = dist.get_rank(), int(os.environ.get("FLASHREC_INCARNATION", "1"))
    mesh = init_device_mesh("cpu", (replicas, 2 // replicas), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    session = flashrec.Session(model, optimizer, state={"scheduler": scheduler})

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict()}

    def save(folder: Path, group: dist.ProcessGroup | None) -> None:
        if life == 1 and rank == 1 and folder.name.startswith(f".draft-{die_saving:08d}"):
            (folder / "torn").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dcp.save(state(), checkpoint_id=folder, process_group=group)

    def load(folder: Path) -> None:
        found = state()
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        scheduler.load_state_dict(found["scheduler"])

    session.checkpoint(checkpoints, save=save, load=load, every=3)
    with (out / f"rank-{rank}").open("a") as said:
        for step in session.steps(steps):
            with step:
                inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if step.is_done:
                print(json.dumps({"life": life, "step": int(step), "loss": loss.item().hex()}), file=said, flush=True)
        print(json.dumps({"life": life, "step": steps, "loss": digest_of(model, optimizer)}), file=said, flush=True)
    dist.destroy_process_group()


main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
