"""flashrec: `flashrec run` in a batch script. A lost process is started again in place, a lost node is replaced by a
spare of the job; with processes that were parked for it (hot), or with new ones (warm)."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.peers.job import Batch, Cell, Job, Peer, own_python
from benchmarks.peers.job_size import FAULT_AFTER, NUM_NODES, NUM_RANKS, STEPS

PARKED = 104  # by this step the parked processes have imported torch; as far between checkpoints as the others


def start_with(*options: str) -> Callable[[Cell], Job]:
    def start(cell: Cell) -> Job:
        words = " ".join((*options, "--", "python", *cell.script("guarded")))
        text = (
            f"#!/bin/bash\n#SBATCH --nodes={NUM_NODES}\n#SBATCH --ntasks-per-node=1\n#SBATCH --no-kill\n"
            f"#SBATCH --no-requeue\nexec flashrec run --spares {NUM_NODES - NUM_RANKS} {words}\n"
        )
        return Batch(cell, text, own_python())

    return start


PEERS = (
    Peer(
        "flashrec, hot spare", "flashrec", "memory",
        "parked processes with torch imported (`hot.park=imports`, `hot.after_s=1`)",
        start_with("--set hot.park=imports --set hot.after_s=1"),
        steps=PARKED + STEPS - FAULT_AFTER, fault_after=PARKED, python=own_python(),
    ),
    Peer(
        "flashrec, warm spare", "flashrec", "memory",
        "nothing is parked (`hot.park=none`); one spare node for two with ranks",
        start_with("--set hot.park=none"), python=own_python(),
    ),
)  # fmt: skip
