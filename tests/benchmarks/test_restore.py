"""The benchmark of restores: what it computes, and that all its ways run and move the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.restore.job import Measured, Row
from benchmarks.restore.results import BEGIN, END, PAGE, RESULTS, Results, ratios, table

ROOT = Path(__file__).resolve().parents[2]


def test_a_ratio_is_that_of_one_round() -> None:
    rounds = [
        Measured(
            {"restore": restore, "raw": raw, "memcpy": 0.5, "joiner": 4.0},
            {"restore": 3.0, "raw": 2.0},
            {"source restore": source, "target joiner": 1.02},
        )
        for restore, raw, source in ((2.0, 1.0, 1.0), (4.0, 4.0, 1.1))
    ]
    row = Row("hsdp", "few", 8, 2_000_000_000, 2, rounds)
    assert ratios(row) == [0.5, 1.0]
    cells = table(Results({}, [row])).splitlines()[-1]
    assert cells.startswith("| hsdp | 8 | 2000 | 2 | 0.67 | 0.80 | 0.75 (0.62 to 0.88) | 0.50 |  | 4.00 | 1.50, 1.00 |")
    assert cells.endswith("| 1.100 | 1.020 |")


def test_the_page_has_the_table_of_the_file() -> None:
    page = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert page == (RESULTS / "restore.md").read_text().strip()


@pytest.mark.torch
def test_all_ways_are_measured() -> None:
    """In a process of its own, as the benchmark is: it forks, and this one may have threads of other tests."""
    text = (
        "import msgspec; from benchmarks.restore.__main__ import measure; "
        "print(msgspec.json.encode(measure('ddp', 'many', 4_000_000, rounds=1)).decode())"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr.decode()
    row = msgspec.json.decode(done.stdout.splitlines()[-1], type=Row)
    (only,) = row.rounds
    assert row.num_tensors > 1000 and row.num_bytes == pytest.approx(4_000_000, rel=0.2)
    assert only.seconds.keys() == {"restore", "joiner", "striped", "raw", "memcpy"}
    assert min(only.seconds.values()) > 0 and min(only.peak.values()) >= 1
