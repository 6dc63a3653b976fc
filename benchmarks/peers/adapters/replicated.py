"""torchft: a lighthouse and one torchrun for each replica group, as its README starts them.

A lost process is started again by its torchrun. For a lost node the benchmark starts the group on the spare node at
once: no scheduler could be faster.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.peers.job import VENV, Cell, Job, Peer, Processes
from benchmarks.peers.job_size import NUM_RANKS, STEPS

LIGHTHOUSE, PORT = "http://n0:29510", 29600
LONG = STEPS + 80  # a survivor alone does this many before the new one is there
HEARTBEAT_TIMEOUT_MS = 1000  # default 5000


def start_in(mode: str) -> Callable[[Cell], Job]:
    num_groups = NUM_RANKS + (mode == "spare")

    def start(cell: Cell) -> Job:
        job = Processes(cell)
        job.start(
            "lighthouse",
            [
                str(VENV / "bin/torchft_lighthouse"), f"--min_replicas={1 if mode == 'shrink' else NUM_RANKS}",
                "--quorum_tick_ms=100", "--join_timeout_ms=10000", f"--heartbeat_timeout_ms={HEARTBEAT_TIMEOUT_MS}",
            ],
            "n0",
        )  # fmt: skip

        def start_group(group: int, node: str) -> None:
            env = {"TORCHFT_LIGHTHOUSE": LIGHTHOUSE, "REPLICA_GROUP_ID": str(group), "PEERS_MODE": mode}
            module, *words = cell.script("replicated")[1:]
            job.start(
                f"group-{group}-{node}",
                [
                    str(VENV / "bin/python"), "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1",
                    "--max-restarts=10", "--monitor-interval=0.1", f"--master-addr={node}", f"--master-port={PORT}",
                    "-m", module, *words,
                ],
                node,
                env,
            )  # fmt: skip

        for group in range(num_groups):
            start_group(group, f"n{(group + 1) % (NUM_RANKS + 1)}")
        if mode != "spare":
            job.later = lambda node: start_group(int(node.removeprefix("n")) - 1, "n0")
        return job

    return start


_SETTINGS = f"heartbeats dead after {HEARTBEAT_TIMEOUT_MS / 1000:g} s, collectives after 2 s"
PEERS = (
    Peer("torchft, goes on with fewer", "torchft-nightly", "memory", _SETTINGS, start_in("shrink"), steps=LONG),
    Peer("torchft, waits for a new replica", "torchft-nightly", "memory", _SETTINGS, start_in("wait")),
    Peer("torchft, spare replica", "torchft-nightly", "memory", f"{_SETTINGS}; FIXED_WITH_SPARES", start_in("spare")),
)
