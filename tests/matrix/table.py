"""The file of the matrix, and the table that the page docs/reference/layouts.md repeats from it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import put_table
from tests.chaos.play import Result
from tests.matrix.cells import COLUMNS
from tests.runtime.layouts.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
FILE, PAGE = ROOT / "benchmarks/results/matrix.json", ROOT / "docs/reference/layouts.md"
BEGIN, END = "<!-- table: benchmarks/results/matrix.json -->", "<!-- end -->"
POWER_CUT = "power-cut"
_WORDS = {"right": "same", "refused": "refused", "missed": "-"}


class Row(msgspec.Struct):
    """One layout. cells: column -> 'same' (every loss and all state bit by bit), 'refused', '-' (it has no such place)
    or what is wrong. Figures are medians over the cells; see `tests.chaos.figures`."""

    name: str
    world_size: int
    replicas: int
    reason: str = ""
    cells: dict[str, str] = {}
    figures: dict[str, float] = {}

    @property
    def is_good(self) -> bool:
        return all(word in ("same", "refused", "-") for word in self.cells.values())


class Matrix(msgspec.Struct):
    torch: str = ""
    commit: str = ""
    rows: dict[str, Row] = {}


def row_of(layout: Layout, results: dict[str, Result]) -> Row:
    """From what came of its cells."""
    groups = layout.replica_groups(layout.world_size)
    found: dict[str, list[float]] = {}
    for result in results.values():
        for name, value in result.figures.items():
            found.setdefault(name, []).append(value)
    return Row(
        layout.name,
        layout.world_size,
        min(map(len, groups)),
        layout.reason,
        {column: word_for(layout, column, result) for column, result in results.items()},
        {name: round(statistics.median(values), 3) for name, values in found.items()},
    )


def word_for(layout: Layout, column: str, result: Result) -> str:
    """A refusal is right where no replica is left, and only there."""
    groups = layout.replica_groups(layout.world_size)
    two_hold_it = layout.is_mirrored or min(map(len, groups)) == 2
    may_refuse = not layout.is_protected or (column == "source" and two_hold_it)
    if result.verdict == "refused" and not may_refuse:
        return "refused, but a replica was left"
    if result.verdict in ("right", "missed") and not layout.is_protected:
        return f"{result.verdict}, but there is no replica"
    if result.verdict == "missed" and column != "amid":
        return f"missed: {result.why}"
    return _WORDS.get(result.verdict, f"{result.verdict}: {result.why}")


def load(path: Path = FILE) -> Matrix:
    """Empty when there is no file yet."""
    return msgspec.json.decode(path.read_bytes(), type=Matrix) if path.exists() else Matrix()


def save(matrix: Matrix, path: Path = FILE) -> None:
    path.write_text(json.dumps(msgspec.to_builtins(matrix), indent=1) + "\n")


def render(matrix: Matrix) -> str:
    """Markdown: the matrix, then the figures, then what is not protected and why."""
    names = [*COLUMNS, POWER_CUT]
    safe = [row for row in matrix.rows.values() if not row.reason]
    lines = [
        f"| layout | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
        *(f"| {row.name} | {' | '.join(row.cells.get(name, '') for name in names)} |" for row in safe),
        "",
        "| layout | ranks | replicas | cells | state of a rank | form (ms) | restore (ms) | total (s) | start (s) |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_figures, safe),
        "",
        "| not protected | why | a lost rank |",
        "|---|---|---|",
        *(f"| {row.name} | {row.reason} | {', '.join(sorted(set(row.cells.values())))} |"
          for row in matrix.rows.values() if row.reason),
        "",
        f"torch {matrix.torch}, commit {matrix.commit}.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _figures(row: Row) -> str:
    played = [word for word in row.cells.values() if word != "-"]
    good = sum(word in ("same", "refused") for word in played)

    def figure(name: str, scale: float = 1.0, digits: int = 0) -> str:
        return f"{row.figures[name] * scale:.{digits}f}" if name in row.figures else ""

    cells: list[Any] = [
        row.name, row.world_size, row.replicas, f"{good} of {len(played)}", f"{figure('state_bytes', 1e-3)} kB",
        figure("form_ms"), figure("restore_ms"), figure("total_s", digits=1), figure("start_s", digits=1),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def put_into_page(text: str, page: Path = PAGE) -> None:
    """Replace the part of the page between the two marks."""
    put_table(page, BEGIN, END, text)


def of_page(page: Path = PAGE) -> str:
    return page.read_text().partition(BEGIN)[2].partition(END)[0].strip()
