"""The same under torchft: every rank is a replica group of its own. What happens without one of them is PEERS_MODE:

shrink: the others go on alone; wait: they wait for a new one; spare: one more replica computes along and takes over.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

from benchmarks.peers import training
from benchmarks.peers.job_size import NUM_RANKS

COLLECTIVE_TIMEOUT = timedelta(seconds=2)  # as flashrec's for a silent node


def main() -> None:
    options = training.parse()
    mode, group = os.environ["PEERS_MODE"], int(os.environ["REPLICA_GROUP_ID"])
    model = training.Transformer()

    def load(state: dict[str, Any]) -> None:
        wrapped.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=COLLECTIVE_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1 if mode == "shrink" else NUM_RANKS,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if mode == "spare" else WorldSizeMode.DYNAMIC,
        timeout=COLLECTIVE_TIMEOUT,
        quorum_timeout=timedelta(seconds=120),
        replica_id=f"peers_{group}",
        init_sync=False,  # all build the same weights
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, training.adamw(wrapped))
    recorder = training.Recorder(options, group)
    while (step := manager.current_step()) < options.steps:
        recorder.begin(step)
        optimizer.zero_grad()
        rank = manager.participating_rank() if mode == "spare" else group
        loss = training.loss_of(wrapped, step, 0 if rank is None else rank)
        loss.backward()
        optimizer.step()
        if manager.current_step() == step + 1 and manager.is_participating():
            recorder.done(step, loss.item(), rank)
            recorder.end_block(step)
    recorder.finish(wrapped, optimizer)
    manager.shutdown(wait=False)
    os._exit(0)  # the process group's threads may wait for peers that have gone


if __name__ == "__main__":
    main()
