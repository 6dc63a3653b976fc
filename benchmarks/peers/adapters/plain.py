"""Plain torch, which survives nothing: what the results of all others are compared with."""

from __future__ import annotations

from benchmarks.peers.job import Cell, Job, Peer, Processes
from benchmarks.peers.job_size import NUM_RANKS

PORT = 29500


def start(cell: Cell, script: str = "plain") -> Job:
    job = Processes(cell)
    for rank in range(NUM_RANKS):
        env = {
            "MASTER_ADDR": "n1", "MASTER_PORT": str(PORT),
            "RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": "0",
        }  # fmt: skip
        job.start(f"rank-{rank}", [str(PEER.python), *cell.script(script)], f"n{rank + 1}", env)
    return job


PEER = Peer("plain torch", "torch", "memory", "no recovery", start, faults=())
