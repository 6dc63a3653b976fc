"""Slurm alone: the job goes back into the queue and starts again from the last checkpoint.

A lost process ends its job step, and the batch script asks for the requeue; for a lost node Slurm does it by itself.
Two of Slurm's waits are set as short as they work here: how long a node may be silent (`SlurmdTimeout`, by default
300 s) and how long a requeued job waits (`cred_expire` in `AuthInfo`, by default 120 s).
"""

from __future__ import annotations

from benchmarks.peers.adapters.plain import PORT
from benchmarks.peers.job import Batch, Cell, Job, Peer
from benchmarks.peers.job_size import EVERY, NUM_RANKS

SLURMD_TIMEOUT_S, CRED_EXPIRE_S, MESSAGE_TIMEOUT_S = 5, 5, 3


def start(cell: Cell) -> Job:
    python = " ".join(["exec", str(PEERS[0].python), *cell.script("plain", checkpoints=True)])
    text = (
        f"#!/bin/bash\n#SBATCH --nodes={NUM_RANKS}\n#SBATCH --ntasks-per-node=1\n#SBATCH --requeue\n"
        "#SBATCH --open-mode=append\n"
        f"export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT={PORT}\n"
        f"export WORLD_SIZE={NUM_RANKS} LOCAL_RANK=0\n"
        f"srun --kill-on-bad-exit=1 bash -c 'export RANK=$SLURM_PROCID; {python}' || scontrol requeue $SLURM_JOB_ID\n"
    )
    return Batch(cell, text, PEERS[0].python)


PEERS = (
    Peer(
        "Slurm requeue", "slurm", "checkpoint",
        f"checkpoint every {EVERY} steps; SlurmdTimeout={SLURMD_TIMEOUT_S}, MessageTimeout={MESSAGE_TIMEOUT_S}, "
        f"cred_expire={CRED_EXPIRE_S}; an idle node waits in the queue's place",
        start, slurmd_timeout_s=SLURMD_TIMEOUT_S,
        conf=(f"AuthInfo=socket={{socket}},cred_expire={CRED_EXPIRE_S}", f"MessageTimeout={MESSAGE_TIMEOUT_S}"),
    ),
)  # fmt: skip
