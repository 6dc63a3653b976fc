"""Processes: too many zombies, too many that stay in uninterruptible sleep, too much load?

A process counts as stuck if it was in state D at two looks, --interval-s apart: a busy disk shows many for an instant,
a dead file server or driver the same ones for ever.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from _checklib import Findings, main, parser_of


def look(args: argparse.Namespace, found: Findings) -> None:
    first = states(args.proc)
    if not first:
        found.unknown(f"no processes are visible in {args.proc}")
        return
    time.sleep(args.interval_s if any(state == "D" for state, _ in first.values()) else 0)
    second = states(args.proc)
    stuck = sorted(name for key, (state, name) in second.items() if state == "D" and first.get(key, ("",))[0] == "D")
    zombies = sum(state == "Z" for state, _ in second.values())
    found.facts |= {"processes": len(second), "zombies": zombies, "stuck": len(stuck)}
    if len(stuck) > args.max_stuck:
        some = ", ".join(stuck[:3])
        found.fail(f"{len(stuck)} processes in uninterruptible sleep, at most {args.max_stuck} wanted: {some}")
    if zombies > args.max_zombies:
        found.fail(f"{zombies} zombie processes, at most {args.max_zombies} wanted")
    if args.max_load_per_cpu is not None:
        look_at_load(args, found)


def states(proc: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """(pid, start time) to (state letter, name); a pid alone may mean another process at the second look."""
    result = {}
    for entry in os.scandir(proc):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text(errors="replace")
            except OSError:
                continue  # it has ended
            name, words = text.partition("(")[2].rpartition(")")[0], text.rpartition(")")[2].split()
            result[entry.name, words[19]] = (words[0], name)
    return result


def look_at_load(args: argparse.Namespace, found: Findings) -> None:
    load = float((args.proc / "loadavg").read_text().split()[1])
    per_cpu = load / (os.cpu_count() or 1)
    found.facts["load_per_cpu"] = round(per_cpu, 2)
    if per_cpu > args.max_load_per_cpu:
        found.warn(f"load of {per_cpu:.1f} per CPU over 5 minutes, at most {args.max_load_per_cpu:g} wanted")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--max-zombies", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--max-stuck", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--interval-s", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--max-load-per-cpu", type=float, help="warns; default: not checked")
    parser.add_argument("--proc", type=Path, default=Path("/proc"))
    main("processes", parser, look)
