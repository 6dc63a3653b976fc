"""The figures: medians of blocks, ratios of neighbouring blocks, and their file, table and plot."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import put_table, quartiles

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs/performance/overhead.md"
BEGIN, END = "<!-- table: benchmarks/results/overhead.md -->", "<!-- end -->"
PARTS = (
    "enter",
    "snapshot",
    "seeding",
    "agreeing",
    "parts",
    "vote",
    "leave",
)  # timed; "enter" and "agreeing" hold the next two
TOGETHER = ("agreeing", "parts", "vote")  # ranks wait for each other in them
SKIPPED = 2  # steps at the begin of a block
_RESAMPLED = 2000


class Row(msgspec.Struct):
    """One layout, size and length of a step. plain_ms, guarded_ms: median of each block. parts_us: see
    `durations_us`."""

    layout: str
    ranks: int
    pad_ms: float
    plain_ms: list[float]
    guarded_ms: list[float]
    parts_us: dict[str, float] = {}
    blocks_of_lives: list[int] = []  # how many of the blocks each pair of jobs has done, in order

    @property
    def ratios(self) -> list[float]:
        """Guarded to plain, of blocks that were measured one after the other."""
        return [guarded / plain for plain, guarded in zip(self.plain_ms, self.guarded_ms, strict=True)]

    @property
    def differences_ms(self) -> list[float]:
        return [guarded - plain for plain, guarded in zip(self.plain_ms, self.guarded_ms, strict=True)]

    @property
    def added_ms(self) -> float:
        return statistics.median(self.differences_ms)

    @property
    def added_interval_ms(self) -> tuple[float, float]:
        """95 % of the medians of as many pairs of jobs, and of as many blocks of each, drawn from these with
        replacement (bootstrap): what two processes differ by goes through all of their blocks."""
        draw, rest = random.Random(1), iter(self.differences_ms)
        lives = [[next(rest) for _ in range(num)] for num in self.blocks_of_lives or [len(self.differences_ms)]]
        medians = sorted(
            statistics.median(
                each for life in draw.choices(lives, k=len(lives)) for each in draw.choices(life, k=len(life))
            )
            for _ in range(_RESAMPLED)
        )
        return medians[round(0.025 * _RESAMPLED)], medians[round(0.975 * _RESAMPLED) - 1]

    @property
    def calls_ms(self) -> float:
        """What all calls of `with step:` take in one step."""
        return sum(self.parts_us.get(part, 0.0) for part in ("enter", "agreeing", "leave")) / 1e3


class Results(msgspec.Struct):
    machine: dict[str, Any]
    rows: list[Row] = []


def median_ms(blocks: list[list[float]]) -> list[float]:
    return [round(1e3 * statistics.median(block[SKIPPED:]), 4) for block in blocks]


def durations_us(calls: list[dict[str, list[tuple[float, float]]]]) -> dict[str, float]:
    """Microseconds of each part, median of its calls. calls: of each rank, begin and end in seconds of one clock. Where
    ranks wait for each other it is counted from the arrival of the last one to the departure of the last one, for plain
    torch waits for it as well; elsewhere it is that of the slowest rank."""
    found = {}
    for part in PARTS:
        same = list(zip(*(rank[part] for rank in calls), strict=False))
        if part in TOGETHER:
            seconds = [max(end for _, end in each) - max(begin for begin, _ in each) for each in same]
        else:
            seconds = [max(end - begin for begin, end in each) for each in same]
        found[part] = round(1e6 * statistics.median(seconds), 2)
    return found


def merge(lives: list[Row]) -> Row:
    """The same row measured with several pairs of jobs."""
    first = lives[0]
    parts_us = {part: round(statistics.median(row.parts_us[part] for row in lives), 2) for part in first.parts_us}
    plain_ms, guarded_ms = (
        [each for row in lives for each in getattr(row, name)] for name in ("plain_ms", "guarded_ms")
    )
    blocks_of_lives = [len(row.plain_ms) for row in lives]
    return Row(first.layout, first.ranks, first.pad_ms, plain_ms, guarded_ms, parts_us, blocks_of_lives)


def table(results: Results) -> str:
    """Markdown."""
    columns = (
        *("layout", "ranks", "plain (ms)", "guarded (ms)", "ratio, median (quartiles)"),
        *("added (ms), 95 %", "calls (ms)", "calls (%)"),
        *(f"{part} (ms)" for part in PARTS),
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in results.rows:
        low, middle, high = quartiles(row.ratios)
        parts = row.parts_us
        cells = [
            row.layout,
            str(row.ranks),
            f"{statistics.median(row.plain_ms):.2f}",
            f"{statistics.median(row.guarded_ms):.2f}",
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
            "{:.2f} ({:.2f} to {:.2f})".format(row.added_ms, *row.added_interval_ms),
            f"{row.calls_ms:.2f}",
            f"{100 * row.calls_ms / statistics.median(row.plain_ms):.2f}",
            *(f"{parts.get(name, 0) / 1e3:.3f}" for name in PARTS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def save(results: Results, folder: Path = RESULTS, page: Path = PAGE) -> None:
    """JSON, Markdown, plot, and the table on the page."""
    (folder / "overhead.json").write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
    (folder / "overhead.md").write_text(table(results))
    put_table(page, BEGIN, END, table(results))
    plot(results, folder / "overhead.svg")


def plot(results: Results, path: Path) -> None:
    """Every pair of blocks as a dot, one line a row. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.4 * len(results.rows)))
    names = []
    for height, row in enumerate(reversed(results.rows)):
        axes.plot(row.ratios, [height] * len(row.ratios), "o", color="C0", alpha=0.3)
        axes.plot([statistics.median(row.ratios)], [height], "|", color="C0", markersize=18)
        names.append(f"{row.layout}, {row.ranks} ranks, {statistics.median(row.plain_ms):.0f} ms")
    axes.axvline(1.0, color="0.7")
    axes.axvline(1.01, color="C2", linestyle=":", label="1 %")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("step with flashrec / step with plain torch (dots: pairs of blocks, bar: median)")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
