"""The figures of a benchmark: median and worst, a file of JSON, a table of Markdown, a plot.

A row of the file is replaced when it is measured again, and says when and at which commit that was.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import put_table

PAPER_S = (4.0, 11.0)  # detection in FlashRecovery (arXiv 2509.03047), table of results


class Injection(msgspec.Struct, frozen=True):
    """One fault: seconds to the verdict and to the resume; None: it did not come within the limit."""

    target: str
    verdict_s: float | None
    resume_s: float | None
    reason: str = ""


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """expects: 'verdict' or 'nothing' (then only `false_verdicts` counts). aim_s: None where there is none. error: why
    the row ended early. suspected, refuted: of all nodes, during the row."""

    name: str
    expects: str
    aim_s: float | None
    injections: tuple[Injection, ...]
    note: str = ""
    suspected: int = 0
    refuted: int = 0
    false_verdicts: tuple[str, ...] = ()
    error: str = ""
    measured_at: str = ""
    commit: str = ""

    @property
    def verdicts_s(self) -> list[float]:
        return [x.verdict_s for x in self.injections if x.verdict_s is not None]

    @property
    def resumes_s(self) -> list[float]:
        return [x.resume_s for x in self.injections if x.resume_s is not None]

    @property
    def num_missed(self) -> int:
        """Injections that should have led to a verdict and did not."""
        return 0 if self.expects == "nothing" else len(self.injections) - len(self.verdicts_s)

    @property
    def is_good(self) -> bool:
        """Everything seen that was to be seen, nothing that was not, and the worst within the aim."""
        if self.error or self.num_missed or self.false_verdicts or not self.injections:
            return False
        return self.expects == "nothing" or self.aim_s is None or max(self.verdicts_s) <= self.aim_s


class Results(msgspec.Struct, frozen=True):
    machine: dict[str, Any]
    rows: tuple[RowResult, ...] = ()

    def with_row(self, row: RowResult, order: Sequence[str]) -> Results:
        """Its earlier measurement is replaced; rows of names that are not in `order` any more are left out."""
        rows = {known.name: known for known in self.rows} | {row.name: row}
        return Results(self.machine, tuple(rows[name] for name in order if name in rows))


def load(path: Path, machine: dict[str, Any]) -> Results:
    """The file's rows if they are of this machine; none otherwise."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Results)
    except FileNotFoundError:
        return Results(machine)
    return found if found.machine == machine else Results(machine)


def save(path: Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
    draft.replace(path)


def figures(values: Sequence[float]) -> str:
    """`median / worst` in seconds, with as many digits as mean something."""
    if not values:
        return "-"
    return f"{_seconds(statistics.median(values))} / {_seconds(max(values))}"


def _seconds(value: float) -> str:
    digits = max(0, 1 - math.floor(math.log10(value))) if value > 0 else 2
    return f"{value:.{min(digits, 3)}f}"


def table(rows: Iterable[RowResult]) -> str:
    """Markdown: one line a row."""
    lines = [
        "| fault | n | detection, median / worst (s) | goes on, median / worst (s) | aim (s) | met |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        aim = "no verdict" if row.expects == "nothing" else "-" if row.aim_s is None else f"≤ {row.aim_s:g}"
        met = "yes" if row.is_good else "no"
        seen = figures(row.verdicts_s)
        remarks = [f"{row.num_missed} not seen"] if row.num_missed else []
        if row.expects == "nothing":
            seen = f"{len(row.false_verdicts)} verdicts ({row.suspected} suspected, {row.refuted} refuted)"
        remarks += [row.error] if row.error else []
        name = f"{row.name} ({row.note})" if row.note else row.name
        cells = [name, str(len(row.injections)), "; ".join([seen, *remarks]), figures(row.resumes_s), aim, met]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"| *paper: any failure, 32 to 4,800 devices* | | *{PAPER_S[0]:g} to {PAPER_S[1]:g}* | | | |")
    return "\n".join(lines) + "\n"


BEGIN, END = "<!-- table: benchmarks/results/detection.md -->", "<!-- end -->"


def put_into(page: Path, text: str) -> None:
    """Replace the table of a page of the documentation, which is between two marks."""
    put_table(page, BEGIN, END, text)


def plot(rows: Iterable[RowResult], path: Path) -> None:
    """Every injection as a dot, one line a row, logarithmic seconds, the paper's range shaded. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.verdicts_s]
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.4 * len(shown)))
    axes.axvspan(*PAPER_S, color="0.9", label="the paper's detection")
    for height, row in enumerate(reversed(shown)):
        axes.plot(row.verdicts_s, [height] * len(row.verdicts_s), "o", color="C0", alpha=0.4)
        axes.plot([statistics.median(row.verdicts_s)], [height], "|", color="C0", markersize=16)
        if row.aim_s is not None:
            axes.plot([row.aim_s], [height], "<", color="C2")
    axes.set_yticks(range(len(shown)), [row.name for row in reversed(shown)])
    axes.set_xscale("log")
    axes.set_xlabel("seconds from the fault to the verdict (dots), median (bar), aim (triangle)")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
