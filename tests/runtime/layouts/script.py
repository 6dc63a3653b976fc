"""The training script of the layouts as a program of its own, for real jobs: no fault is in it.

    flashrec run … -- python tests/runtime/layouts/script.py --layout hsdp --steps 8 --out /shared/out

Each rank leaves in OUT what `outcome.Outcome` reads.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.runtime.layouts import program
    from tests.runtime.layouts.layout import TABLE

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", required=True, choices=sorted(TABLE))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    program.train(str(args.out / f"rank{os.environ['RANK']}.json"), args.layout, args.steps)


if __name__ == "__main__":
    main()
