"""`make bench-seam`: an all-reduce through a group of each engine against the same through a group of torch alone."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import quartiles
from benchmarks.seam import script
from flashrec.core import events
from flashrec.runtime.torch_private import reconfigure
from tests.runtime.support import Cluster

RESULTS = Path(__file__).resolve().parents[1] / "results"
CALLS = {"4096": 200, "1048576": 40}
_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seam", description=__doc__)
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks, half of them after a recovery")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave the results as they are")
    args = parser.parse_args()
    engines = ["inplace", "native"] if reconfigure.is_there() else ["inplace"]
    rows = [row for engine in engines for row in summary(engine, measure(engine, args.blocks))]
    version = torch.__version__.split("+")[0]
    print(table(rows))
    if args.write:
        name = f"seam-torch-{version}"
        found = {"torch": torch.__version__, "cores": os.cpu_count(), "blocks": args.blocks, "rows": rows}
        (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / f"{name}.md").write_text(table(rows))


def measure(engine: str, blocks: int) -> list[dict[str, Any]]:
    """Pairs of medians, in microseconds, as rank 0 has measured them."""
    with tempfile.TemporaryDirectory(prefix="flashrec-seam-") as name:
        folder = Path(name)
        cluster = Cluster(folder / "job", 2, FLASHREC_ENGINE=engine)
        try:
            cluster.start_all(script.main, store=str(folder / "store"), blocks=blocks, calls=CALLS)
            deadline = time.monotonic() + _TIMEOUT_S
            while not all((cluster.path / f"measured{rank}").exists() for rank in range(2)):
                if time.monotonic() > deadline or any(process.exitcode for process in cluster.processes.values()):
                    raise RuntimeError(f"not measured\n{cluster.logs()}")
                time.sleep(0.02)
            cluster.fence()
            (cluster.path / "fenced").touch()
            cluster.await_message(events.WorkerRestored, count=2, generation=2)
            cluster.await_end()
            found: list[dict[str, Any]] = cluster.results()[0]  # type: ignore[assignment]
            return found
        finally:
            cluster.close()


def summary(engine: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = sorted({(row["ranks"], row["bytes"], row["recovered"]) for row in found}, key=lambda k: (-k[0], *k[1:]))
    rows = []
    for ranks, num_bytes, recovered in keys:
        pairs = [
            row for row in found if (row["ranks"], row["bytes"], row["recovered"]) == (ranks, num_bytes, recovered)
        ]
        low, middle, high = quartiles([row["ours"] / row["plain"] for row in pairs])
        rows.append(
            {
                "engine": engine, "ranks": ranks, "bytes": num_bytes, "recovered": recovered, "pairs": len(pairs),
                "plain_us": statistics.median(row["plain"] for row in pairs),
                "ours_us": statistics.median(row["ours"] for row in pairs),
                "added_us": statistics.median(row["ours"] - row["plain"] for row in pairs),
                "ratio": middle, "ratio_quartiles": [low, high],
            }
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| engine | ranks of the group | bytes | after a recovery | plain (us) | ours (us) | added (us) "
        "| ratio (quartiles) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["ratio_quartiles"]
        lines.append(
            f"| {row['engine']} | {row['ranks']} | {row['bytes']} | {'yes' if row['recovered'] else 'no'} "
            f"| {row['plain_us']:.1f} | {row['ours_us']:.1f} | {row['added_us']:+.1f} "
            f"| {row['ratio']:.3f} ({low:.3f} to {high:.3f}) |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
