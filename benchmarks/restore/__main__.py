"""`make bench-restore`: one restore after the other, each way in turn, so whatever else the machine does hits all."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path

import msgspec
import torch
import torch.multiprocessing as mp

from benchmarks.restore import job
from benchmarks.restore.results import Results, save, table

MB = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restore", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of each row")
    parser.add_argument("--sizes", default="16,256,1024", help="of the state of one rank, MB")
    parser.add_argument("--layouts", default="ddp,hsdp")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results and page as they are")
    args = parser.parse_args()
    results = Results(
        {
            "cores": os.cpu_count(), "processor": platform.processor(), "torch": str(torch.__version__),
            "load before": os.getloadavg()[0],
        }, []
    )  # fmt: skip
    for layout in args.layouts.split(","):
        for size in map(int, args.sizes.split(",")):
            for tensors in job.TENSORS_OF:
                results.rows.append(measure(layout, tensors, size * MB, args.rounds))
                print(table(Results({}, results.rows[-1:])).splitlines()[-1], flush=True)
    results.machine["load after"] = os.getloadavg()[0]
    print(table(results))
    if args.write:
        save(results)


def measure(layout: str, tensors: str, num_bytes: int, rounds: int) -> job.Row:
    with tempfile.TemporaryDirectory(prefix="flashrec-restore-") as folder:
        mp.start_processes(  # forked: this process has torch loaded, and no threads
            job.main, (folder, layout, tensors, num_bytes, rounds), job.WORLD[layout], start_method="fork"
        )
        return msgspec.json.decode((Path(folder) / "row.json").read_bytes(), type=job.Row)


if __name__ == "__main__":
    main()
