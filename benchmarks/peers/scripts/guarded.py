"""The same under flashrec."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrec
from benchmarks.peers import training


def main() -> None:
    options = training.parse()
    flashrec.init()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(training.Transformer())
    optimizer = training.adamw(model)
    recorder = training.Recorder(options, rank)
    session = flashrec.Session(model, optimizer)
    for step in session.steps(options.steps):
        recorder.begin(step)
        with step:
            loss = training.loss_of(model, step, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.is_done:
            recorder.done(step, loss.item())
            recorder.end_block(step)
    recorder.finish(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
