"""Plain torch inside nvidia-resiliency-ext's in-process wrapper: survivors call the function again, a reserve rank
takes the place of the lost one, all read the last checkpoint.

The wrapper looks at annotations, which therefore are no strings here, and Optional is the form that it knows.
"""

import argparse
import os
from datetime import timedelta
from typing import Optional

# Else imported by the first optimizer step; an import that a restart interrupts is never made whole.
import torch._dynamo  # noqa: F401
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

from benchmarks.peers import training
from benchmarks.peers.job_size import NUM_RANKS
from benchmarks.peers.scripts import plain

# gloo has no abort: what waits for a silent node is let go by this. As long as the heartbeats' timeout. With 2 s, and
# 0.1 s below, ranks of a busy machine took each other for lost.
GLOO_TIMEOUT = HEARTBEAT_TIMEOUT = timedelta(seconds=3)
OFTEN = timedelta(seconds=0.2)


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1},
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(NUM_RANKS), inprocess.rank_assignment.ShiftRanks()
    ),
    monitor_thread_interval=OFTEN,
    monitor_process_interval=OFTEN,
    heartbeat_interval=OFTEN,
    progress_watchdog_interval=OFTEN,
    heartbeat_timeout=HEARTBEAT_TIMEOUT,
    last_call_wait=OFTEN,
)
def train(
    options: argparse.Namespace,
    base_store: dist.Store,
    call_wrapper: Optional[inprocess.CallWrapper] = None,  # noqa: UP045
) -> None:
    assert call_wrapper is not None
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(call_wrapper.iteration), base_store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=GLOO_TIMEOUT,
    )
    plain.train(options, call_wrapper.ping)
    dist.destroy_process_group()


def main() -> None:
    options = training.parse()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0",
        multi_tenant=True,
        wait_for_workers=True,
    )
    train(options, store)


if __name__ == "__main__":
    main()
