"""A training script that writes down each sample it loads and uses, and each step that counts, life by life."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import flashrec
from tests.runtime import programs
from tests.runtime.programs import WIDTH

NUM_SAMPLES, BATCH, MICRO_BATCHES = 61, 3, 2


class Samples(Dataset):
    """Sample i, augmented. folder: `loaded.RANK.LIFE` there gets a line for each sample that is loaded."""

    def __init__(self, folder: str | None) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if self.folder:
            write(self.folder, "loaded", index)
        sample = torch.full((WIDTH,), index / NUM_SAMPLES) + torch.randn(WIDTH) * random.random()
        return index, sample


def loader(folder: str | None, world_size: int, rank: int, num_workers: int) -> DataLoader:
    samples = Samples(folder)
    sampler = DistributedSampler(samples, world_size, rank, drop_last=True)
    return DataLoader(samples, BATCH, sampler=sampler, num_workers=num_workers)


def bits(batch: list[torch.Tensor]) -> list[Any]:
    return [batch[0].tolist(), batch[1].numpy().tobytes().hex()[:400]]


def write(folder: str, name: str, item: Any) -> None:
    path = Path(folder) / f"{name}.{os.environ['RANK']}.{os.environ['FLASHREC_INCARNATION']}"
    with path.open("a") as file:
        file.write(json.dumps(item) + "\n")


def train(
    out: str,
    folder: str,
    steps: int,
    faults: list[tuple[int, int, int, str]] = (),
    lose_vote: tuple[int, int] | None = None,
    late_reduce: int = -1,
) -> None:
    """late_reduce: the step with a collective after its optimizer step."""
    multiprocessing.current_process()._config["daemon"] = False  # it is, for the tests: no children would be allowed
    multiprocessing.set_start_method("fork", force=True)  # as in a script; here it is that of the tests
    rank = programs.start()
    hit = programs.Faults(list(faults))
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = flashrec.Session(model, optimizer)
    data = session.data(loader(folder, dist.get_world_size(), rank, num_workers=2), micro_batches=MICRO_BATCHES)
    session.on_commit(lambda step: write(folder, "committed", step))
    if lose_vote and lose_vote[0] == rank:
        programs._lose_vote(lose_vote[1])
    for step in session.steps(steps):
        with step:
            for micro in range(MICRO_BATCHES):
                batch = data.batch(step, micro)
                write(folder, "used", [int(step), micro, bits(batch)])
                hit.visit(step, "forward")
                model(batch[1]).square().mean().backward()
            optimizer.step()
            hit.visit(step, "after-optimizer")
            optimizer.zero_grad()
            if step == late_reduce:
                dist.all_reduce(torch.zeros(1))
        hit.visit(step, "between")
    Path(out).write_text(json.dumps({"digest": programs.digest(model, optimizer)}))
