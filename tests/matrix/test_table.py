"""What the matrix prints and keeps: right refusals told from wrong ones, and the page equal to the file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.chaos.play import Result
from tests.matrix import table
from tests.matrix.cells import COLUMNS, case_of, columns_for
from tests.runtime.layouts.layout import TABLE, Layout

PAIRS = Layout("pairs", 4, "-", groups=((0, 2), (1, 3)))
SINGLE = Layout("single", 2, "-", reason="each shard exists once")


@pytest.mark.parametrize(
    ("layout", "column", "verdict", "is_good"),
    [
        (PAIRS, "backward", "right", True),
        (PAIRS, "amid", "missed", True),
        (PAIRS, "forward", "missed", False),
        (PAIRS, "backward", "refused", False),
        (PAIRS, "source", "refused", True),
        (PAIRS, "backward", "wrong", False),
        (PAIRS, "backward", "hung", False),
        (SINGLE, "late-backward", "refused", True),
        (SINGLE, "late-backward", "right", False),
        (SINGLE, "late-backward", "missed", False),
        (dataclasses.replace(PAIRS, groups=()), "source", "refused", False),
    ],
)
def test_a_cell_is_good_only_for_the_right_reason(layout: Layout, column: str, verdict: str, is_good: bool) -> None:
    assert table.row_of(layout, {column: Result(verdict)}).is_good == is_good


def test_a_cell_hits_another_rank_in_every_column() -> None:
    victims = [case_of(PAIRS, column).faults[0].victim for column in COLUMNS.values()]
    assert set(victims) == {0, 1, 2, 3}


def test_the_source_is_of_the_group_of_the_victim() -> None:
    victim, source = case_of(PAIRS, COLUMNS["source"]).faults
    assert {victim.victim, source.victim} in ({0, 2}, {1, 3})


def test_a_layout_without_replicas_is_hit_once() -> None:
    assert len(columns_for(SINGLE)) == 1 < len(columns_for(PAIRS))


def test_figures_are_medians_and_the_table_can_be_read_again(tmp_path: Path) -> None:
    results = {name: Result("right", figures={"form_ms": ms}) for name, ms in (("forward", 10), ("backward", 30))}
    matrix = table.Matrix(rows={"pairs": table.row_of(PAIRS, results), "single": table.row_of(SINGLE, {})})
    assert matrix.rows["pairs"].figures == {"form_ms": 20}
    table.save(matrix, tmp_path / "matrix.json")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.put_into_page(table.render(table.load(tmp_path / "matrix.json")), page)
    assert table.of_page(page) == table.render(matrix).strip()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert "| single | each shard exists once |" in page.read_text()


def test_the_page_says_what_the_file_says() -> None:
    matrix = table.load()
    assert table.of_page() == table.render(matrix).strip()
    assert set(matrix.rows) <= set(TABLE)
    assert not [row.name for row in matrix.rows.values() if not row.is_good]
