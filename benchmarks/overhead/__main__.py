"""`make bench-overhead`: both jobs live all the time and take turns, so whatever else the machine does hits both."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead import script
from benchmarks.overhead.results import Results, Row, median_ms, save, table
from tests.runtime import support
from tests.runtime.support import Cluster

CONFIGURATIONS = (("ddp", 2), ("ddp", 4), ("hsdp", 4))
PADS_MS = (10.0, 50.0, 250.0)
LONG_MS = 100.0  # such steps get a third of the blocks, and vary less
_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--blocks", type=int, default=15, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument("--only", default="", help="layout:ranks[,…]")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results and page as they are")
    args = parser.parse_args()
    support.PRELOAD.append("benchmarks.overhead.script")
    wanted = [tuple(each.split(":")) for each in args.only.split(",") if each] or CONFIGURATIONS
    results = Results({"cores": os.cpu_count(), "processor": platform.processor(), "torch": str(torch.__version__)}, [])
    for layout, ranks in wanted:
        for pad_ms in PADS_MS:
            blocks = args.blocks if pad_ms < LONG_MS else max(3, args.blocks // 3)
            results.rows.append(measure(layout, int(ranks), pad_ms, blocks, args.steps))
            print(table(Results({}, results.rows[-1:])).splitlines()[-1], flush=True)
    print(table(results))
    if args.write:
        save(results)


def measure(layout: str, ranks: int, pad_ms: float, blocks: int, steps: int) -> Row:
    """Two jobs of `ranks` ranks, plain and guarded, taking turns."""
    with tempfile.TemporaryDirectory(prefix="flashrec-overhead-") as name:
        folder = Path(name)
        (folder / "turns").mkdir()
        config: dict[str, Any] = {
            "layout": layout, "turns": str(folder / "turns"), "pad_s": pad_ms / 1e3, "blocks": blocks, "steps": steps,
            "rendezvous": str(folder / "rendezvous"),
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
            found = {kind: job.results()[0] for kind, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.close()
    parts = {part: 1e6 * statistics.median(seconds) for part, seconds in found["guarded"]["parts"].items()}
    return Row(
        layout, ranks, pad_ms, median_ms(found["plain"]["blocks"]), median_ms(found["guarded"]["blocks"]),
        {part: round(value, 2) for part, value in parts.items()},
    )  # fmt: skip


def _give_turn(job: Cluster, turns: Path, turn: str) -> None:
    (turns / turn).touch()
    deadline = time.monotonic() + _TIMEOUT_S
    while not all((turns / f"{turn}.{rank}").exists() for rank in range(job.world_size)):
        if time.monotonic() > deadline or any(process.exitcode for process in job.processes.values()):
            raise RuntimeError(f"block {turn} did not end\n{job.logs()}")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
