"""The figures: median and worst of each phase, and their file, table and plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.detection.reading import Line, event_of, since
from benchmarks.figures import put_table

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs/performance/recovery.md"
BEGIN, END = "<!-- table: benchmarks/results/recovery.md -->", "<!-- end -->"
PHASES = ("detect", "fence", "launch", "form", "restore", "first_step")
PARTS = {"start": "has its rank", "script": "flashrec.init()", "build": "reports"}  # of a replacement, since its launch


class Measured(msgspec.Struct):
    """One recovery, in seconds. phases: as in the report; they add up to rto_s. parts: of the slowest replacement, from
    the launch to the end of each; they run beside fence and launch."""

    target: str
    rto_s: float
    phases: dict[str, float | None]
    parts: dict[str, float]


class Row(msgspec.Struct):
    """All runs of one kind of fault in one tier. error: why there are fewer than wanted. date, commit: of the runs."""

    fault: str
    tier: str
    runs: list[Measured]
    error: str = ""
    date: str = ""
    commit: str = ""

    @property
    def rto_s(self) -> list[float]:
        return [run.rto_s for run in self.runs]

    def phase_s(self, name: str) -> list[float]:
        return [run.phases.get(name) or 0.0 for run in self.runs]

    def part_s(self, name: str) -> list[float]:
        return [run.parts[name] for run in self.runs if name in run.parts]


class Results(msgspec.Struct):
    machine: dict[str, Any]
    rows: list[Row] = []

    def with_rows(self, rows: Sequence[Row], order: Sequence[tuple[str, str]]) -> Results:
        """Earlier rows of the same fault and tier are replaced; order: of (fault, tier), others are left out."""
        known = {(row.fault, row.tier): row for row in (*self.rows, *rows) if row.runs or row.error}
        return Results(self.machine, [known[key] for key in order if key in known])


def added(rows: Sequence[Row], known: Sequence[Row]) -> list[Row]:
    """The rows, with the runs that are known of the same fault and tier in front of theirs."""
    before = {(row.fault, row.tier): row.runs for row in known}
    return [msgspec.structs.replace(row, runs=[*before.get((row.fault, row.tier), []), *row.runs]) for row in rows]


def load(machine: dict[str, Any], folder: Path = RESULTS) -> Results:
    """The file's rows if they are of this machine and these versions; none otherwise."""
    try:
        found = msgspec.json.decode((folder / "recovery.json").read_bytes(), type=Results)
    except FileNotFoundError:
        return Results(machine)
    return found if found.machine == machine else Results(machine)


def parts(lines: Sequence[Line], at: float) -> dict[str, float]:
    """When the last replacement launched after `at` had its rank, called flashrec.init() and reported; in seconds since
    the launch. What has not come is left out."""
    after = since(lines, at)
    launched = next((line for line in after if (line.get("effect") or {}).get("type") == "LaunchWorkers"), None)
    if launched is None:
        return {}
    tasks = [task for of_node in launched["effect"]["placement"].values() for task in of_node]
    lives = {(task["rank"], task["incarnation"]) for task in tasks}
    found = {}
    for name, kind in (("start", "WorkerStarted"), ("script", "WorkerJoined"), ("build", "WorkerReported")):
        first: dict[tuple[int, int], float] = {}
        for line in after:
            event = event_of(line, kind)
            if event is not None and (event["rank"], event["incarnation"]) in lives:
                first.setdefault((event["rank"], event["incarnation"]), line["mono"] - launched["mono"])
        if set(first) == lives:
            found[name] = max(first.values())
    return found


def describe(one: Measured) -> str:
    """One line for the terminal."""
    said = [f"{one.rto_s:.3f} s on {one.target}:"]
    said += [f"{name} {one.phases.get(name) or 0.0:.3f}" for name in PHASES]
    return " ".join(said + [f"{name} after {seconds:.3f}" for name, seconds in one.parts.items()])


def figures(values: Sequence[float]) -> str:
    """`median / worst`."""
    return f"{statistics.median(values):.3f} / {max(values):.3f}" if values else ""


def table(results: Results) -> str:
    """Markdown, seconds."""
    columns = ["fault", "tier", "n", "RTO", *(name.replace("_", " ") for name in PHASES), *PARTS.values()]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in results.rows:
        cells = [row.fault, row.tier, str(len(row.runs)) + (f" ({row.error})" if row.error else ""), figures(row.rto_s)]
        cells += [figures(row.phase_s(name)) if any(row.phase_s(name)) else "" for name in PHASES]
        cells += [figures(row.part_s(name)) for name in PARTS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def described(results: Results) -> str:
    """One line on what was measured where."""
    said = results.machine
    when = ", ".join(sorted({f"{row.date} at commit {row.commit}" for row in results.rows}))
    return (
        f"{said['cpus']} cores, Linux {said['kernel']}, {said['slurm']}, Python {said['python']}, torch "
        f"{said['torch']}; {said['nodes']} nodes in namespaces of one machine, 2 ranks on 2 of them. Measured {when}."
    )


def save(results: Results, folder: Path = RESULTS, page: Path = PAGE) -> None:
    """JSON, Markdown, plot, and the table on the page."""
    (folder / "recovery.json").write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
    text = f"{described(results)}\n\n{table(results)}"
    (folder / "recovery.md").write_text(text)
    put_table(page, BEGIN, END, text)
    plot(results, folder / "recovery.svg")


def plot(results: Results, path: Path) -> None:
    """One stacked bar a row: medians of the phases. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results.rows if row.runs]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.35 * len(rows)))
    for height, row in enumerate(reversed(rows)):
        left = 0.0
        for number, name in enumerate(PHASES):
            width = statistics.median(row.phase_s(name))
            axes.barh(
                height, width, left=left, color=f"C{number}", label=name.replace("_", " ") if height == 0 else None
            )
            left += width
        axes.plot([max(row.rto_s)], [height], "k|", markersize=12)
    axes.set_yticks(range(len(rows)), [f"{row.fault}, {row.tier}" for row in reversed(rows)])
    axes.set_xlabel("seconds from the fault to the first new step: medians of the phases (bar: the worst run)")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
