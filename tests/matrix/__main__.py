"""`make test-matrix`: layout x fault. Every cell must give the bits of the undisturbed run of its layout, or be refused
where no replica is left. Exits with 1 if one is wrong; what that one has logged is kept, and how to play it again said.

What is measured replaces the same cells in benchmarks/results/matrix.json and on docs/reference/layouts.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.chaos.case import to_json
from tests.chaos.lane import BAD, play_all
from tests.chaos.play import Result
from tests.matrix import table
from tests.matrix.cells import COLUMNS, case_of, columns_for
from tests.runtime.layouts.layout import TABLE, Layout


def main() -> int:
    args = _arguments()
    layouts = [TABLE[name] for name in (args.layouts.split(",") if args.layouts else TABLE)]
    faults = args.faults.split(",") if args.faults else list(COLUMNS)
    folder = Path(tempfile.mkdtemp(prefix="flashrec-matrix-"))
    matrix = table.load()
    if args.power_cut:
        from tests.matrix import power

        found = power.cut_each(layouts, folder)
    else:
        found = _play(layouts, faults, args.jobs, args.seconds, folder)
    is_good = True
    for layout in (each for each in layouts if found[each.name]):
        row = table.row_of(layout, found[layout.name])
        if (known := matrix.rows.get(layout.name)) is not None:
            row.cells = known.cells | row.cells
            row.figures = known.figures | (row.figures if not args.power_cut else {})
        is_good &= row.is_good
        matrix.rows[layout.name] = row
    matrix.rows = {name: matrix.rows[name] for name in TABLE if name in matrix.rows}
    matrix.torch, matrix.commit = str(torch.__version__), _commit()
    print(table.render(matrix))
    if args.write:
        table.save(matrix)
        table.put_into_page(table.render(matrix))
    if is_good:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--layouts", default="", help="only these, separated by commas")
    parser.add_argument("--faults", default="", help=f"only these, of {', '.join(COLUMNS)}")
    parser.add_argument("--jobs", type=int, default=max(2, len(os.sched_getaffinity(0))), help="cells at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell later than this")
    parser.add_argument("--power-cut", action="store_true", help="instead: real Slurm jobs, each loses a node")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave file and page as they are")
    return parser.parse_args()


def _play(
    layouts: list[Layout], faults: list[str], jobs: int, seconds: float, folder: Path
) -> dict[str, dict[str, Result]]:
    found: dict[str, dict[str, Result]] = {layout.name: {} for layout in layouts}
    wanted = [(layout, column) for layout in layouts for column in columns_for(layout) if column.name in faults]
    cases = [case_of(layout, column, index) for index, (layout, column) in enumerate(wanted)]
    for number, (case, result, _) in enumerate(play_all(cases, TABLE, folder, jobs, seconds), 1):
        column = wanted[case.index][1].name
        found[case.layout][column] = result
        print(f"{number:>4}/{len(cases)} {case.layout:20} {column:16} {result.verdict} {result.why}", flush=True)
        if result.verdict in BAD:
            print(f"{result.log}\nto play it again: make test-chaos CASE='{to_json(case)}'", flush=True)
    for name, cells_found in found.items():
        found[name] = {column: cells_found[column] for column in COLUMNS if column in cells_found}
    return found


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always"], cwd=table.ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
