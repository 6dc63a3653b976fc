"""nvidia-resiliency-ext: in-process restart with a reserve rank, and in-job restart by its launcher."""

from __future__ import annotations

from benchmarks.peers.adapters import torchrun
from benchmarks.peers.job import VENV, Cell, Job, Peer, Processes
from benchmarks.peers.job_size import EVERY, NUM_NODES

PORT = 29700


def start_in_process(cell: Cell) -> Job:
    """Ranks are started one by one: a launcher would end them all when one ends."""
    job = Processes(cell)
    for rank in range(NUM_NODES):
        env = {
            "MASTER_ADDR": "n1", "MASTER_PORT": str(PORT),
            "RANK": str(rank), "WORLD_SIZE": str(NUM_NODES), "LOCAL_RANK": "0",
        }  # fmt: skip
        node = f"n{(rank + 1) % NUM_NODES}"
        job.start(f"rank-{rank}", [str(VENV / "bin/python"), *cell.script("wrapped", checkpoints=True)], node, env)
    return job


def start_in_job(cell: Cell) -> Job:
    options = (*torchrun.OPTIONS, "--ft-workload-check-interval=0.5", "--ft-enable-nic-monitor=False")
    return torchrun.start_agents(cell, [str(VENV / "bin/ft_launcher"), *options], "watched")


PEERS = (
    Peer(
        "nvidia-resiliency-ext, in process", "nvidia-resiliency-ext", "checkpoint",
        f"checkpoint every {EVERY} steps; a reserve rank waits; intervals 0.2 s, heartbeats and gloo end after 3",
        start_in_process,
    ),
    Peer(
        "nvidia-resiliency-ext, in job", "nvidia-resiliency-ext", "checkpoint",
        f"checkpoint every {EVERY} steps; as torchrun, with rank monitors; keep-alive 5 s, dead after 15: fixed",
        start_in_job,
    ),
)  # fmt: skip
