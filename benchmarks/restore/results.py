"""The figures: medians of rounds, ratios within a round, and their file, table and plot."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import put_table, quartiles
from benchmarks.restore.job import Row

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs/performance/restore.md"
BEGIN, END = "<!-- table: benchmarks/results/restore.md -->", "<!-- end -->"
COLUMNS = (
    *("layout", "tensors", "MB", "connections", "restore (GB/s)", "bare TCP (GB/s)", "restore / bare TCP (quartiles)"),
    *("a joiner (GB/s)", "two sources (GB/s)", "memcpy (GB/s)", "CPU, restore and bare TCP (s/GB)"),
    *("peak of source", "peak of target"),
)


class Results(msgspec.Struct):
    machine: dict[str, Any]
    rows: list[Row] = []


def table(results: Results) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in results.rows:
        low, middle, high = quartiles(ratios(row))
        cells = [
            row.layout,
            f"{row.num_tensors}",
            f"{row.num_bytes / 1e6:.0f}",
            str(row.streams),
            speed(row, "restore"),
            speed(row, "raw"),
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            speed(row, "joiner"),
            speed(row, "striped"),
            speed(row, "memcpy"),
            f"{cpu(row, 'restore'):.2f}, {cpu(row, 'raw'):.2f}",
            f"{peak(row, 'source'):.3f}",
            f"{peak(row, 'target'):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratios(row: Row) -> list[float]:
    """Speed of a restore to that of bare TCP, in the same round."""
    return [each.seconds["raw"] / each.seconds["restore"] for each in row.rounds]


def speed(row: Row, way: str) -> str:
    """GB/s, median; '' where it was not measured."""
    seconds = [each.seconds[way] for each in row.rounds if way in each.seconds]
    return f"{row.num_bytes / statistics.median(seconds) / 1e9:.2f}" if seconds else ""


def cpu(row: Row, way: str) -> float:
    """Seconds of CPU of both ends for a gigabyte."""
    return statistics.median(each.cpu_s[way] for each in row.rounds) / row.num_bytes * 1e9


def peak(row: Row, role: str) -> float:
    """The highest memory in any restore, over what the process holds after it."""
    return max(value for each in row.rounds for name, value in each.peak.items() if name.startswith(role))


def save(results: Results, folder: Path = RESULTS, page: Path = PAGE) -> None:
    """JSON, Markdown, plot, and the table on the page."""
    (folder / "restore.json").write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
    (folder / "restore.md").write_text(table(results))
    put_table(page, BEGIN, END, table(results))
    plot(results, folder / "restore.svg")


def plot(results: Results, path: Path) -> None:
    """GB/s of each way, one group of bars a row, every round as a dot. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = {"restore": "restore", "joiner": "restore of a joiner", "striped": "from two sources", "raw": "bare TCP"}
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.6 * len(results.rows)))
    names = []
    for place, row in enumerate(reversed(results.rows)):
        for i, (way, label) in enumerate(ways.items()):
            speeds = [row.num_bytes / each.seconds[way] / 1e9 for each in row.rounds if way in each.seconds]
            if not speeds:
                continue
            height = place + 0.3 - 0.2 * i
            axes.barh(height, statistics.median(speeds), 0.18, color=f"C{i}", label=label)
            axes.plot(speeds, [height] * len(speeds), ".", color="0.2", alpha=0.5, markersize=3)
        names.append(f"{row.layout}, {row.num_bytes / 1e6:.0f} MB, {row.num_tensors} tensors")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("GB/s (bar: median, dots: rounds)")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
