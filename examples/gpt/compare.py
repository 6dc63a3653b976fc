"""Compare two output directories of train.py bit by bit: losses of every rank and step, and final digests.

Prints `identical: yes` and exits 0, or `identical: no`, the first difference and exits 1; exits 2 when a
directory cannot be read. A step that was redone after a failure is in the file twice: the last line counts.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


class Unreadable(Exception):
    """A directory does not hold the complete output of one run; the text says what is missing."""


def read_losses(path: Path) -> dict[int, dict[str, str]]:
    """Exact losses by step. A line cut by a crash is skipped: its step must then be there once more."""
    steps: dict[int, dict[str, str]] = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        steps[record["step"]] = {"loss": record["loss"], "mean": record["mean"]}
    return steps


def read_run(directory: Path) -> dict[int, tuple[dict[int, dict[str, str]], str]]:
    """Rank -> (losses by step, final digest) of a finished run; raises Unreadable if anything is missing."""
    run: dict[int, Any] = {}
    for path in sorted(directory.glob("final-*.json")):
        final = json.loads(path.read_text())
        losses_path = directory / f"rank-{final['rank']}.jsonl"
        if not losses_path.is_file():
            raise Unreadable(f"{losses_path} is missing")
        losses = read_losses(losses_path)
        missing = sorted(set(range(final["steps"])) - set(losses))
        if missing:
            raise Unreadable(f"{losses_path} has no line for step {missing[0]}")
        run[final["rank"]] = (losses, final["digest"])
    if not run:
        raise Unreadable(f"no final-*.json in {directory}: the run did not finish, or had no --out")
    ranks_seen = {int(path.stem.split("-")[1]) for path in directory.glob("rank-*.jsonl")}
    if ranks_seen != set(run):
        raise Unreadable(f"ranks {sorted(ranks_seen - set(run))} of {directory} have not finished")
    return run


def first_difference(left: Path, right: Path) -> str:
    """What differs first, in the order of steps; '' when the two runs are identical."""
    a, b = read_run(left), read_run(right)
    if set(a) != set(b):
        return f"ranks {sorted(a)} against {sorted(b)}"
    for step in sorted({step for run in (a, b) for losses, _ in run.values() for step in losses}):
        for rank in sorted(a):
            ours, theirs = a[rank][0].get(step), b[rank][0].get(step)
            if ours != theirs:
                return f"step {step}, rank {rank}: {ours} against {theirs}"
    for rank in sorted(a):
        if a[rank][1] != b[rank][1]:
            return f"final digest of rank {rank}: {a[rank][1]} against {b[rank][1]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python compare.py results/undisturbed results/recovered",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("left", type=Path, help="--out directory of one run")
    parser.add_argument("right", type=Path, help="--out directory of the other run")
    options = parser.parse_args()
    try:
        difference = first_difference(options.left, options.right)
    except Unreadable as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print(f"identical: no, first difference: {difference}" if difference else "identical: yes")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
