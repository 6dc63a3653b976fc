"""A training script that keeps checkpoints: DDP and plain torch.save, each rank of the group writes a digest."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrec
from tests.runtime import programs


def keep(out: str, folder: str, steps: int = 1_000_000, every: int = 5, raises_in: str = "") -> None:
    """raises_in: 'save' or 'dying', in which the hook raises on rank 1."""
    rank = programs.start()
    torch.manual_seed(7)
    net = torch.nn.Linear(8, 8)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = flashrec.Session(model, optimizer)

    def save(path: Path, group: dist.ProcessGroup | None) -> None:
        if rank == 1 and raises_in == ("save" if group is None else "dying"):
            raise ValueError(f"no room in {raises_in}")
        if dist.get_rank(group) == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path / "state.pt")
        (path / f"digest-{rank}").write_text(programs.digest(model, optimizer))

    def load(path: Path) -> None:
        found = torch.load(path / "state.pt")
        net.load_state_dict(found["net"])
        optimizer.load_state_dict(found["optimizer"])
        right = (path / "digest-0").read_text() == programs.digest(model, optimizer)
        print(f"loaded {path.name}: {right}", file=sys.stderr, flush=True)

    session.checkpoint(folder.format(rank=rank), save=save, load=load, every=every)
    for step in session.steps(steps):
        with step:
            model(torch.ones(2, 8) * (step % 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.is_done:
            print(f"done {step}", file=sys.stderr, flush=True)
        time.sleep(0.01)
