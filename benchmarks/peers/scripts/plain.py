"""Plain torch, and a checkpoint every k steps where one is asked for: the reference, and what restarts start again."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import training


def train(options: argparse.Namespace, each_step: Callable[[], None] = lambda: None) -> None:
    """From the last checkpoint to the last step, in the default process group. each_step: called after each."""
    rank = dist.get_rank()
    model = DistributedDataParallel(training.Transformer())
    optimizer = training.adamw(model)
    checkpoints = training.Checkpoints(options, model, optimizer)
    recorder = training.Recorder(options, rank)
    for step in recorder.steps(checkpoints.load()):
        loss = training.loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.done(step, loss.item())
        checkpoints.save(step + 1, rank)
        each_step()
        recorder.end_block(step)
    recorder.finish(model, optimizer)


def main() -> None:
    options = training.parse()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
