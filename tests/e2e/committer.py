"""A training script that keeps one checkpoint file, as small as can be: `committer.py FOLDER`. For tests of leases.

Each life of rank 0 writes a draft under a name of its own and renames it only if it may. When FOLDER/hold is there, the
first life waits between the two until a later life has committed: as a process that the system did not let run.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrec


def commit(session: flashrec.Session, folder: Path, step: int, life: int) -> None:
    draft, checkpoint = folder / f"draft-{life}", folder / "checkpoint"
    draft.write_text(f"{step} {life}")
    if life == 1 and (folder / "hold").exists():
        (folder / "held").touch()
        while int(checkpoint.read_text().split()[1]) == 1:
            time.sleep(0.02)
        print(f"life 1 asks about step {step} after a later life has committed", flush=True)
    may = session.may_commit(timeout_s=1.0)
    if (folder / "held").exists():
        print(f"life {life} may commit step {step}: {may}", flush=True)
    if may:
        draft.replace(checkpoint)


def main(folder: Path) -> None:
    flashrec.init()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = flashrec.Session(model, optimizer)
    for step in session.steps(1_000_000):
        with step:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.is_done and dist.get_rank() == 0:
            commit(session, folder, step + 1, int(os.environ["FLASHREC_INCARNATION"]))
        time.sleep(0.02)


main(Path(sys.argv[1]))
