"""`make bench-overhead`: both jobs live all the time and take turns, so whatever else the machine does hits both."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead import script
from benchmarks.overhead.results import Results, Row, durations_us, median_ms, merge, save, table
from benchmarks.overhead.script import WITHOUT_BUFFERS
from tests.runtime import support
from tests.runtime.support import Cluster

CONFIGURATIONS = (("ddp", 2), (WITHOUT_BUFFERS, 2), ("ddp", 4), ("hsdp", 2), ("hsdp", 4))
AIM_MS = 50.0  # of which 1 % is allowed; with a core for each rank these rows get all blocks
SHARES = {10.0: 1 / 4, AIM_MS: 1.0, 250.0: 1 / 12}  # sleep of a step: the share of blocks
MANY_RANKS_SHARE = 1 / 3  # with fewer cores than ranks
BLOCKS_OF_A_LIFE = 4  # then both jobs are started anew: two processes differ by up to 2 % for no other reason
TIMED_STEPS = 60
_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--blocks", type=int, default=28, help="pairs of blocks in a row with steps of 50 ms")
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument("--only", default="", help="layout:ranks[,…]")
    parser.add_argument("--pads", default="", help="milliseconds[,…]: only steps with these sleeps")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results and page as they are")
    args = parser.parse_args()
    support.PRELOAD.append("benchmarks.overhead.script")
    wanted = [tuple(each.split(":")) for each in args.only.split(",") if each] or CONFIGURATIONS
    pads_ms = [float(each) for each in args.pads.split(",") if each] or list(SHARES)
    results = Results({"cores": os.cpu_count(), "processor": platform.processor(), "torch": str(torch.__version__)}, [])
    for layout, ranks in wanted:
        for pad_ms in [each for each in pads_ms if layout != WITHOUT_BUFFERS or each == AIM_MS]:
            blocks = num_blocks(args.blocks, int(ranks), pad_ms, os.cpu_count() or 1)
            lives = max(1, round(blocks / BLOCKS_OF_A_LIFE))
            found = [measure(layout, int(ranks), pad_ms, blocks // lives, args.steps) for _ in range(lives)]
            results.rows.append(merge(found))
            print(table(Results({}, results.rows[-1:])).splitlines()[-1], flush=True)
    print(table(results))
    if args.write:
        save(results)


def num_blocks(most: int, ranks: int, pad_ms: float, cores: int) -> int:
    """Pairs of blocks of a row, so that all rows together take about twelve minutes."""
    share = SHARES.get(pad_ms, 1.0)
    if ranks > cores and share == 1.0:
        share = MANY_RANKS_SHARE
    return max(3, round(most * share))


def measure(layout: str, ranks: int, pad_ms: float, blocks: int, steps: int) -> Row:
    """Two jobs of `ranks` ranks, plain and guarded, taking turns."""
    with tempfile.TemporaryDirectory(prefix="flashrec-overhead-") as name:
        folder = Path(name)
        (folder / "turns").mkdir()
        config: dict[str, Any] = {
            "layout": layout, "turns": str(folder / "turns"), "pad_s": pad_ms / 1e3, "blocks": blocks, "steps": steps,
            "timed_steps": min(TIMED_STEPS, blocks * steps), "rendezvous": str(folder / "rendezvous"),
        }  # fmt: skip
        jobs = {"plain": Cluster(folder / "plain", ranks), "guarded": Cluster(folder / "guarded", ranks)}
        try:
            for kind, job in jobs.items():
                job.start_all(script.main, plain=kind == "plain", **config)
            for block in range(blocks):
                for kind in list(jobs)[:: 1 if block % 2 else -1]:
                    _give_turn(jobs[kind], folder / "turns", f"{kind}.{block}")
            for job in jobs.values():
                job.await_end()
            found = {kind: job.results() for kind, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.close()
    plain_ms, guarded_ms = (median_ms(found[kind][0]["blocks"]) for kind in ("plain", "guarded"))
    parts_us = durations_us([found["guarded"][rank]["parts"] for rank in range(ranks)])
    return Row(layout, ranks, pad_ms, plain_ms, guarded_ms, parts_us)


def _give_turn(job: Cluster, turns: Path, turn: str) -> None:
    (turns / turn).touch()
    deadline = time.monotonic() + _TIMEOUT_S
    while not all((turns / f"{turn}.{rank}").exists() for rank in range(job.world_size)):
        if time.monotonic() > deadline or any(process.exitcode for process in job.processes.values()):
            raise RuntimeError(f"block {turn} did not end\n{job.logs()}")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
