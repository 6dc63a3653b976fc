"""The benchmark of overhead: what it computes from step times, and that both of its jobs run."""

from __future__ import annotations

import pytest

from benchmarks.overhead.__main__ import measure
from benchmarks.overhead.results import BEGIN, END, PAGE, PARTS, RESULTS, Results, Row, median_ms, table


def test_a_ratio_is_that_of_neighbouring_blocks() -> None:
    row = Row("ddp", 2, 10, plain_ms=[10, 20, 30], guarded_ms=[11, 20, 36])
    assert row.ratios == pytest.approx([1.1, 1.0, 1.2])
    assert row.added_ms == pytest.approx(1)
    assert "| ddp | 2 | 20.00 | 20.00 | 1.100 (1.050 to 1.150) | 1.00 |" in table(Results({}, [row]))


def test_the_first_steps_of_a_block_do_not_count() -> None:
    assert median_ms([[9, 9, 0.001, 0.002, 0.003]]) == [2.0]


def test_the_page_has_the_table_of_the_file() -> None:
    page = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert page == (RESULTS / "overhead.md").read_text().strip()


@pytest.mark.torch
def test_both_jobs_take_turns_to_the_end() -> None:
    row = measure("ddp", 2, pad_ms=1, blocks=2, steps=5)
    assert len(row.plain_ms) == len(row.guarded_ms) == 2
    assert min(row.plain_ms + row.guarded_ms) > 1
    assert set(row.parts_us) == set(PARTS)
    assert row.parts_us["vote"] > row.parts_us["leave"] > 0
