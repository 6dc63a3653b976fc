"""`make test-matrix`: layout x fault. Every cell must give the bits of the undisturbed run of its layout, or be refused
where no replica is left. Exits with 1 if one is wrong; what that one has logged is kept, and how to play it again said.

What is measured replaces the same cells in benchmarks/results/matrix.json and on docs/reference/layouts.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from tests.chaos.case import to_json
from tests.chaos.lane import BAD, begin, play_until_hit
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
        found = _play(layouts, faults, args.jobs, folder)
    is_good = True
    for layout in layouts:
        row = table.row_of(layout, found[layout.name])
        if (known := matrix.rows.get(layout.name)) is not None:
            row.cells = known.cells | row.cells
            row.figures = known.figures | (row.figures if not args.power_cut else {})
        is_good &= row.is_good
        matrix.rows[layout.name] = row
    matrix.rows = {name: matrix.rows[name] for name in TABLE if name in matrix.rows}
    matrix.torch, matrix.commit = torch.__version__, _commit()
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
    parser.add_argument("--power-cut", action="store_true", help="instead: real Slurm jobs, each loses a node")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave file and page as they are")
    return parser.parse_args()


def _play(layouts: list[Layout], faults: list[str], jobs: int, folder: Path) -> dict[str, dict[str, Result]]:
    found: dict[str, dict[str, Result]] = {layout.name: {} for layout in layouts}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), begin) as pool:
        wanted = [(each, column) for each in layouts for column in columns_for(each) if column.name in faults]
        cells = {}
        for index, (layout, column) in enumerate(wanted):
            case = case_of(layout, column, index)
            cells[pool.submit(play_until_hit, case, TABLE, folder)] = layout.name, column.name, case
        for number, future in enumerate(as_completed(cells), 1):
            name, column, case = cells[future]
            _, result, _ = future.result()
            found[name][column] = result
            print(f"{number:>4}/{len(cells)} {name:20} {column:16} {result.verdict} {result.why}", flush=True)
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
