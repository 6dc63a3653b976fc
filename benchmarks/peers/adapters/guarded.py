"""flashrec: `flashrec run` in a batch script. A lost process is started again in place, a lost node is replaced by a
spare of the job."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.peers.job import Batch, Cell, Job, Peer, own_python
from benchmarks.peers.job_size import NUM_NODES, NUM_RANKS


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
        "flashrec, warm spare", "flashrec", "memory", "defaults; one spare node for two with ranks", start_with(),
        python=own_python(),
    ),
)  # fmt: skip
