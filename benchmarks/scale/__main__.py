"""`make bench-scale`: the control plane with simulated agents, size by size, and a model of the whole recovery."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

import flashrec
from benchmarks.scale.manager import Order
from benchmarks.scale.results import RESULTS, Results, forget, losses_table, quiet_table, save, take

DEVICES = "32,256,960,2880,4800,10000,32768"
PER_NODE, SPARES = 8, 9
LARGE = 20_000  # from here on a round less, as each takes long


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--devices", default=DEVICES, help="sizes of the job, 8 devices a node")
    parser.add_argument("--rounds", type=int, default=2, help="of each loss")
    parser.add_argument("--steady", type=float, default=5.0, help="seconds of training whose cost is measured")
    parser.add_argument("--full", action="store_true", help="also eight nodes that fall silent; more rounds")
    parser.add_argument(
        "--mesh", action="store_true", help="every rank has a key for every other one (gloo, reconfigure)"
    )
    parser.add_argument("--keep", action="store_true", help="keep what the file has of other sizes")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results and page as they are")
    args = parser.parse_args()
    results = Results(
        {
            "date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "python": platform.python_version(),
            "flashrec": flashrec.__version__, "msgspec": msgspec.__version__, "kernel": platform.release(),
            "load before": os.getloadavg()[0],
        }
    )  # fmt: skip
    if args.keep:
        former = msgspec.json.decode((RESULTS / "scale.json").read_bytes(), type=Results)
        results = msgspec.structs.replace(former, machine=results.machine)
    for devices in map(int, args.devices.split(",")):
        rounds = (2 if args.full else 1) * (args.rounds if devices < LARGE else 1)
        forget(results, devices)
        take(results, measure(order(devices, rounds, args.steady, "mesh" if args.mesh else "root", args.full)))
        results.machine["load after"] = os.getloadavg()[0]
        print(losses_table(results).splitlines()[-1], flush=True)
        if args.write:
            save(results)
    print(losses_table(results))
    print(quiet_table(results))


def order(devices: int, rounds: int, steady_s: float, rendezvous: str, is_full: bool) -> Order:
    lose = [(1, "silence"), (1, "reset")]
    if devices >= 16 * PER_NODE:
        lose += [(8, "reset"), *([(8, "silence")] if is_full else [])]
    return Order(devices, SPARES, tuple(lose), rounds, steady_s, PER_NODE, rendezvous)


def measure(what: Order) -> list[dict[str, object]]:
    """One manager, in a process of its own. Raises CalledProcessError if a recovery did not succeed."""
    with tempfile.TemporaryDirectory(prefix="flashrec-scale-") as folder:
        results, log = Path(folder) / "results.jsonl", Path(folder) / "log"
        with log.open("w") as output:
            argv = [sys.executable, "-m", "benchmarks.scale.manager", msgspec.json.encode(what).decode(), str(results)]
            try:
                subprocess.run(argv, stdout=output, stderr=output, check=True)
            except subprocess.CalledProcessError:
                print(log.read_text(errors="replace")[-2000:], file=sys.stderr)
                raise
        return [json.loads(line) for line in results.read_text().splitlines()]


if __name__ == "__main__":
    main()
