"""`make test-chaos`: many random cases, several at a time. Exits with 1 if one is wrong, hung or refused without a
reason, and prints how to play that one again."""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.case import describe, from_json, to_json
from tests.chaos.draw import draw
from tests.chaos.lane import BAD, Played, Wanted, play_all
from tests.runtime.layouts.layout import TABLE, Layout


def main() -> int:
    args = _arguments()
    # mirrored: what a second loss may find unmirrored is no table's business; the matrix and tests/core look at it
    chosen = args.layouts.split(",") if args.layouts else [name for name in TABLE if not TABLE[name].is_mirrored]
    table = {name: layout for name, layout in TABLE.items() if name in chosen}
    if not table:
        print(f"no such layout: {args.layouts}; there are {', '.join(TABLE)}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="flashrec-chaos-"))
    wanted = _chosen(args, table)
    print(f"{len(wanted)} cases, {', '.join(table)}; {args.jobs} at a time; logs of bad ones in {folder}", flush=True)
    began, found = time.monotonic(), []
    for played in play_all(wanted, table, folder, args.jobs, args.seconds):
        found.append(played)
        _say(played, f"{len(found)}/{len(wanted)}")
    summary = summarize(found, time.monotonic() - began)
    print(json.dumps(summary, indent=2))
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    is_good = not any(result.verdict in BAD for _, result, _ in found)
    if is_good:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--case", default="", help="SEED:INDEX[:ATTEMPT], or a case as JSON: only this one, once")
    parser.add_argument("--layouts", default="", help="only these, separated by commas")
    parser.add_argument("--jobs", type=int, default=max(2, len(os.sched_getaffinity(0))), help="cases at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case later than this")
    parser.add_argument("--json", type=Path, help="write the summary there")
    return parser.parse_args()


def _chosen(args: argparse.Namespace, table: dict[str, Layout]) -> list[Wanted]:
    if args.case.startswith("{"):
        return [from_json(args.case)]
    if args.case:
        seed, index, *attempt = map(int, args.case.split(":"))
        return [draw(seed, index, attempt[0] if attempt else 0, table)]
    print(f"seed {args.seed}")
    return [(args.seed, index) for index in range(args.cases)]


def _say(played: Played, number: str) -> None:
    case, result, _ = played
    what = "; ".join(map(describe, case.faults))
    print(
        f"{number:>8} {result.verdict:8} {case.name:12} {case.layout} x{case.world_size}: {what}"
        f"  [{result.num_losses} lost, {result.seconds:.1f} s]" + (f"  {result.why}" if result.why else ""),
        flush=True,
    )
    if result.verdict in BAD:
        print(f"{result.log}\nto play it again: make test-chaos CASE='{to_json(case)}'", flush=True)


def summarize(found: list[Played], seconds: float) -> dict[str, object]:
    """Counts, altogether and by layout."""
    by_layout: dict[str, collections.Counter[str]] = {}
    for case, result, _ in found:
        by_layout.setdefault(case.layout, collections.Counter())[result.verdict] += 1
    return {
        "cases": len(found),
        "verdicts": dict(collections.Counter(result.verdict for _, result, _ in found)),
        "refused because": dict(collections.Counter(r.why for _, r, _ in found if r.verdict == "refused")),
        "faults": sum(len(case.faults) for case, _, _ in found),
        "ranks lost": sum(result.num_losses for _, result, _ in found),
        "gave up": sum(result.num_gave_up for _, result, _ in found),
        "drawn again": sum(missed for _, _, missed in found),
        "seconds": round(seconds, 1),
        "layouts": {name: dict(counts) for name, counts in sorted(by_layout.items())},
        "bad": [json.loads(to_json(case)) for case, result, _ in found if result.verdict in BAD],
    }


if __name__ == "__main__":
    sys.exit(main())
