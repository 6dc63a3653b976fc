"""The benchmark of overhead: what it computes from step times, and that both of its jobs run."""

from __future__ import annotations

import pytest

from benchmarks.overhead.__main__ import measure, num_blocks
from benchmarks.overhead.results import (
    BEGIN,
    END,
    PAGE,
    PARTS,
    RESULTS,
    TOGETHER,
    Results,
    Row,
    durations_us,
    median_ms,
    merge,
    table,
)


def test_a_ratio_is_that_of_neighbouring_blocks() -> None:
    row = Row("ddp", 2, 10, plain_ms=[10, 20, 30], guarded_ms=[11, 20, 36])
    assert row.ratios == pytest.approx([1.1, 1.0, 1.2])
    assert row.added_ms == pytest.approx(1)
    assert row.added_interval_ms == (0, 6)
    row.parts_us = {"enter": 150.0, "snapshot": 50.0, "agreeing": 240.0, "vote": 99.0, "leave": 10.0}
    wanted = "| ddp | 2 | 20.00 | 20.00 | 1.100 (1.050 to 1.150) | 1.00 (0.00 to 6.00) | 0.40 | 2.00 |"
    assert wanted in table(Results({}, [row]))


def test_an_interval_is_narrower_with_more_pairs() -> None:
    few = Row("ddp", 2, 10, plain_ms=[10] * 6, guarded_ms=[10, 11, 12] * 2)
    many = Row("ddp", 2, 10, plain_ms=[10] * 300, guarded_ms=[10, 11, 11.5, 12, 12.5] * 60)
    assert few.added_interval_ms == (0, 2)
    assert 1 < many.added_interval_ms[0] <= many.added_ms <= many.added_interval_ms[1] < 2


def test_pairs_of_several_jobs_are_one_row() -> None:
    lives = [Row("ddp", 2, 10, plain_ms=[i], guarded_ms=[i + 1], parts_us={"enter": float(i)}) for i in (3, 8, 4)]
    merged = Row("ddp", 2, 10, [3, 8, 4], [4, 9, 5], parts_us={"enter": 4.0}, blocks_of_lives=[1, 1, 1])
    assert merge(lives) == merged


def test_blocks_of_the_same_jobs_do_not_make_an_interval_narrower() -> None:
    """One pair of jobs may differ from the next by more than its own blocks do."""
    differences = [0.0] * 10 + [1.0] * 10 + [2.0] * 10
    alone = Row("ddp", 2, 10, plain_ms=[10] * 30, guarded_ms=[10 + each for each in differences])
    three = Row("ddp", 2, 10, alone.plain_ms, alone.guarded_ms, blocks_of_lives=[10, 10, 10])
    assert three.added_ms == alone.added_ms == 1.0
    assert three.added_interval_ms == (0, 2)
    assert alone.added_interval_ms[0] > 0 or alone.added_interval_ms[1] < 2


def test_waiting_for_the_slowest_rank_does_not_count() -> None:
    ms = 1e-3
    early = {part: [(0.0, 9 * ms), (10 * ms, 19 * ms)] for part in PARTS}
    late = {part: [(8 * ms, 8.5 * ms), (18 * ms, 18.5 * ms)] for part in PARTS}
    found = durations_us([early, late])
    assert {part: found[part] for part in TOGETHER} == dict.fromkeys(TOGETHER, pytest.approx(1000))
    assert {found[part] for part in PARTS if part not in TOGETHER} == {9000.0}


@pytest.mark.parametrize(
    ("ranks", "pad_ms", "wanted"), [(2, 50, 36), (2, 10, 9), (2, 250, 3), (4, 50, 12), (4, 10, 9), (2, 33, 36)]
)
def test_the_row_of_the_aim_gets_most_of_the_time(ranks: int, pad_ms: float, wanted: int) -> None:
    assert num_blocks(36, ranks, pad_ms, cores=2) == wanted


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
    assert row.parts_us["agreeing"] > row.parts_us["leave"] > 0
