"""A training script that may go on in a world of another size. Rank 0 ends after its update of step 4."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrec
from tests.runtime import programs
from tests.runtime.support import die


def train(out: str, steps: int = 1_000_000, resizes: bool = True) -> None:
    """resizes: the script says what it does in a world of another size."""
    rank = programs.start()
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = flashrec.Session(model, optimizer)
    if resizes:
        session.on_resize(lambda old, new: None)
    session.on_commit(lambda step: print(f"committed {step}", file=sys.stderr, flush=True))
    for step in session.steps(steps):
        with step:
            model(torch.ones(2, 8) * (step % 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step == 4:
                die()
            dist.all_reduce(torch.ones(1))
