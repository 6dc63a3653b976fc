"""torchrun: an agent a node; all workers are started again from the last checkpoint.

A third agent waits as a redundant one of the rendezvous when the loss of a node is what comes.
"""

from __future__ import annotations

from benchmarks.peers.job import VENV, Cell, Job, Peer, Processes
from benchmarks.peers.job_size import EVERY, NUM_RANKS

PORT = 29400
# Else ranks read the addresses of the earlier round in the store that the agents share, and fail again:
# https://github.com/pytorch/pytorch/issues/135712
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
OPTIONS = (
    f"--nnodes={NUM_RANKS}", "--nproc-per-node=1", "--max-restarts=10", "--monitor-interval=0.1", "--rdzv-id=peers",
    "--rdzv-backend=c10d", f"--rdzv-endpoint=n1:{PORT}", "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=5",
)  # fmt: skip


def start_agents(cell: Cell, launcher: list[str], script: str) -> Job:
    job = Processes(cell)

    def start_agent(node: str) -> None:
        own = cell.folder / f"tmp-{node}"  # launchers name sockets in /tmp, which nodes share here, after their pids
        own.mkdir()
        words = cell.script(script, checkpoints=True)
        job.start(f"agent-{node}", [*launcher, f"--local-addr={node}", *words], node, {**ENV, "TMPDIR": str(own)})

    for index in range(NUM_RANKS):
        start_agent(f"n{index + 1}")
    if cell.fault == "node":
        job.spares = lambda: start_agent("n0")
    return job


def start(cell: Cell) -> Job:
    return start_agents(cell, [str(VENV / "bin/python"), "-m", "torch.distributed.run", *OPTIONS], "plain")


PEERS = (
    Peer(
        "torchrun", "torch", "checkpoint",
        f"checkpoint every {EVERY} steps; monitor every 0.1 s, keep-alive every 1 s, dead after 5; a spare agent waits",
        start,
    ),
)  # fmt: skip
