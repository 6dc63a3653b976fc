"""The figures of all peers: medians and worst, equality, ratios to ours, and their file, table and plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import put_table, quartiles
from benchmarks.peers.job import FaultKind
from benchmarks.peers.reading import Recovery

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs/performance/peers.md"
BEGIN, END = "<!-- table: benchmarks/results/peers.md -->", "<!-- end -->"
FAULTS: tuple[FaultKind, ...] = ("process", "node")
OURS = "flashrec"  # rows of that package
AIM = 5.0  # times faster than every restart from a checkpoint


class Run(msgspec.Struct, frozen=True):
    """One run with a fault. recovery: None if the run failed, and `error` says why. equal: final parameters and
    optimizer state of every rank have the bits of the undisturbed run."""

    recovery: Recovery | None
    equal: bool
    error: str = ""


class Cell(msgspec.Struct, frozen=True):
    """All runs of a peer with one kind of fault."""

    fault: FaultKind
    runs: tuple[Run, ...]
    measured_at: str = ""
    commit: str = ""
    load: float = 0.0  # one-minute average of the machine before the first run

    def figures(self, name: str) -> list[float]:
        """`resume_s`, `new_s`, `whole_s` or `redone` of the runs that have it."""
        values = [getattr(run.recovery, name) for run in self.runs if run.recovery is not None]
        return [value for value in values if value is not None]

    @property
    def errors(self) -> list[str]:
        return sorted({run.error for run in self.runs if run.error})

    @property
    def equality(self) -> str:
        """'yes' only if every run that was asked for went through and was equal."""
        good = sum(run.equal for run in self.runs)
        return "yes" if good == len(self.runs) and good else "no" if not good else f"{good} of {len(self.runs)}"


class Calm(msgspec.Struct, frozen=True):
    """A peer without a fault, beside plain torch. ratios: seconds of a block of steps over those of plain torch, of
    blocks measured one after the other. equal: the results have the same bits. error: why there is none."""

    ratios: tuple[float, ...] = ()
    equal: bool = False
    error: str = ""
    measured_at: str = ""
    load: float = 0.0

    @property
    def percent(self) -> str:
        """Median (quartiles) of what is added."""
        if not self.ratios:
            return "-"
        low, middle, high = (100 * (ratio - 1) for ratio in quartiles(list(self.ratios)))
        return f"{middle:.1f} ({low:.1f} to {high:.1f})"


class Row(msgspec.Struct, frozen=True):
    """One peer."""

    name: str
    version: str
    keeps: str
    settings: str
    cells: tuple[Cell, ...] = ()
    calm: Calm | None = None

    def cell(self, fault: FaultKind) -> Cell | None:
        return next((cell for cell in self.cells if cell.fault == fault), None)

    def with_cell(self, cell: Cell) -> Row:
        known = {each.fault: each for each in self.cells} | {cell.fault: cell}
        return msgspec.structs.replace(self, cells=tuple(known[fault] for fault in FAULTS if fault in known))

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)


class Results(msgspec.Struct, frozen=True):
    machine: dict[str, Any]
    rows: tuple[Row, ...] = ()

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def with_row(self, row: Row, order: Sequence[str]) -> Results:
        """Its earlier measurement is replaced; rows of names that are not in `order` any more are left out."""
        rows = {known.name: known for known in self.rows} | {row.name: row}
        return Results(self.machine, tuple(rows[name] for name in order if name in rows))


def ratios(results: Results, fault: FaultKind) -> dict[str, float]:
    """Of each peer's median time to a new step to the best one of ours."""
    medians = {
        row.name: statistics.median(found)
        for row in results.rows
        if (cell := row.cell(fault)) and (found := cell.figures("new_s"))
    }
    ours = [value for name, value in medians.items() if name.startswith(OURS)]
    return {n: v / min(ours) for n, v in medians.items() if not n.startswith(OURS)} if ours else {}


def verdict(results: Results, fault: FaultKind) -> list[str]:
    """One line for each aim: met, or by how much it is missed."""
    found = ratios(results, fault)
    if not found:
        return []
    restarts = {row.name: found[row.name] for row in results.rows if row.keeps == "checkpoint" and row.name in found}
    lines = []
    for what, peers, aim in (("restart from a checkpoint", restarts, AIM), ("peer", found, 1.0)):
        if not peers:
            continue
        missed = [f"{name} {ratio:.1f}" for name, ratio in peers.items() if ratio < aim]
        state = f"missed by {', '.join(missed)}" if missed else f"met, the least is {min(peers.values()):.1f}"
        lines.append(f"loss of a {fault}, every {what} takes at least {aim:g} times as long: {state}")
    return lines


def pair(values: Sequence[float], digits: int = 1) -> str:
    """`median / worst`; '-' if there are none."""
    return f"{statistics.median(values):.{digits}f} / {max(values):.{digits}f}" if values else "-"


def table(results: Results) -> str:
    """Markdown: two tables of faults, one of overheads, what went wrong, and the verdicts."""
    parts = [_fault_table(results, fault) for fault in FAULTS]
    parts += [_peer_table(results)]
    errors = [
        f"* {row.name}, {cell.fault}: {error}" for row in results.rows for cell in row.cells for error in cell.errors
    ]
    errors += [f"* {row.name}, no fault: {row.calm.error}" for row in results.rows if row.calm and row.calm.error]
    parts += ["What did not run, and what it said:\n\n" + "\n".join(errors) + "\n"] if errors else []
    aims = [f"* {line}" for fault in FAULTS for line in verdict(results, fault)]
    return "\n".join([*parts, "Aims:\n\n" + "\n".join(aims) + "\n"])


def _fault_table(results: Results, fault: FaultKind) -> str:
    columns = (
        f"loss of a {fault}", "n", "first new step (s)", "goes on (s)", "whole again (s)", "steps redone", "equal",
        "to ours",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    compared = ratios(results, fault)
    for row in results.rows:
        if (cell := row.cell(fault)) is None:
            continue
        times = [pair(cell.figures(name)) for name in ("new_s", "resume_s", "whole_s")]
        ratio = f"{compared[row.name]:.1f}" if row.name in compared else ""
        num_good = len(cell.figures("new_s"))
        count = str(num_good) if num_good == len(cell.runs) else f"{num_good} of {len(cell.runs)}"
        cells = [row.name, count, *times, pair(cell.figures("redone"), 0), cell.equality, ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _peer_table(results: Results) -> str:
    columns = ("peer", "version", "state comes from", "settings", "overhead (%), median (quartiles)", "equal, no fault")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in results.rows:
        calm = row.calm or Calm()
        equal = "-" if not calm.ratios else "yes" if calm.equal else "no"
        lines.append(f"| {' | '.join((row.name, row.version, row.keeps, row.settings, calm.percent, equal))} |")
    return "\n".join(lines) + "\n"


def load(path: Path, machine: dict[str, Any]) -> Results:
    """The file's rows if they are of this machine; none otherwise."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Results)
    except FileNotFoundError:
        return Results(machine)
    return found if found.machine == machine else Results(machine)


def save(results: Results, folder: Path = RESULTS, page: Path | None = PAGE) -> None:
    """JSON, Markdown, plot, and the tables on the page."""
    draft = folder / "peers.json.new"
    draft.write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
    draft.replace(folder / "peers.json")
    (folder / "peers.md").write_text(table(results))
    if page is not None:
        put_table(page, BEGIN, END, table(results))
    plot(results, folder / "peers.svg")


def plot(results: Results, path: Path) -> None:
    """Bars of the time to the first new step, dots of its runs, steps redone and equality beside them. Needs
    matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 1.5 + 0.45 * len(results.rows)), sharey=True, sharex=True)
    names = [row.name for row in reversed(results.rows)]
    for axes, fault in zip(panels, FAULTS, strict=True):
        for height, row in enumerate(reversed(results.rows)):
            cell = row.cell(fault)
            if cell is None or not (times := cell.figures("new_s")):
                axes.text(0.02, height, "did not run", transform=axes.get_yaxis_transform(), va="center", color="0.5")
                continue
            axes.barh(height, statistics.median(times), color="C2" if row.is_ours else "C0", alpha=0.6)
            axes.plot(times, [height] * len(times), "k.", markersize=4)
            mark = {"yes": "=", "no": "≠"}.get(cell.equality, cell.equality)
            note = f"  {statistics.median(cell.figures('redone')):.0f} redone  {mark}"
            axes.text(max(times), height, note, va="center", fontsize=8)
        axes.set_title(f"loss of a {fault}")
        axes.set_xscale("log")
        axes.set_xlabel("seconds from the fault to the first new step (bar: median)")
        axes.margins(x=0.25)
    panels[0].set_yticks(range(len(names)), names)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
