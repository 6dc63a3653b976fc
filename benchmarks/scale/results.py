"""Figures of the scenario: medians of rounds, their file, tables and plot."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import put_table
from benchmarks.scale import model

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs/performance/scale.md"
END = "<!-- end -->"
PARTS = ("fence", "place", "plan", "keys", "form", "restore", "resume")


class Loss(msgspec.Struct, frozen=True):
    """One kind of loss at one size. seconds, cpu_s: one entry a round; per_agent: median of agents that lost none."""

    devices: int
    nodes: int
    how: str
    seconds: dict[str, list[float]]
    cpu_s: list[float]
    agents_cpu_s: list[float]
    generations: list[int]
    per_agent: dict[str, float]
    peak_bytes: int

    def median(self, part: str) -> float:
        return statistics.median(self.seconds[part])


class Quiet(msgspec.Struct, frozen=True):
    """Training, nothing failing. cpu, agents_cpu: of one core."""

    devices: int
    agents: int
    beats_per_s: float
    cpu: float
    agents_cpu: float
    rss_bytes: int


class Start(msgspec.Struct, frozen=True):
    devices: int
    seconds: float
    cpu_s: float


class Results(msgspec.Struct):
    machine: dict[str, Any]
    losses: list[Loss] = []
    quiet: list[Quiet] = []
    starts: list[Start] = []


def take(results: Results, lines: list[dict[str, Any]]) -> None:
    """Add what one manager has written."""
    rounds: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for line in lines:
        devices = line["num_ranks"]
        if line["what"] == "start":
            results.starts.append(Start(devices, line["seconds"], line["cpu_s"]))
        elif line["what"] == "steady":
            beats, seconds = line["agents"]["out"]["beats"], line["seconds"]
            results.quiet.append(
                Quiet(
                    devices, line["num_agents"], beats["sum"] / seconds, line["cpu_s"] / seconds,
                    line["agents_cpu_s"] / seconds, line["rss_bytes"],
                )
            )  # fmt: skip
        else:
            rounds.setdefault((devices, line["nodes"], line["how"]), []).append(line)
    for (devices, nodes, how), same in rounds.items():
        each = [parts(line) for line in same]
        seconds = {part: [one[part] for one in each] for part in each[0]}
        per_agent = {
            f"{what} {way}": statistics.median(line["agents"][way][what]["median"] for line in same)
            for way in ("in", "out")
            for what in ("messages", "bytes")
            if all(line["agents"][way][what] for line in same)
        }
        results.losses.append(
            Loss(
                devices, nodes, how, seconds, [line["cpu_s"] for line in same],
                [line["agents_cpu_s"] for line in same], [line["generations"] for line in same], per_agent,
                max(line["peak_bytes"] for line in same),
            )
        )  # fmt: skip
    for of_size in (results.losses, results.quiet, results.starts):
        of_size.sort(key=lambda one: one.devices)


def forget(results: Results, devices: int) -> None:
    """What was measured at this size before."""
    results.losses = [loss for loss in results.losses if loss.devices != devices]
    results.quiet = [one for one in results.quiet if one.devices != devices]
    results.starts = [start for start in results.starts if start.devices != devices]


def parts(line: dict[str, Any]) -> dict[str, float]:
    """Seconds of each part of one recovery. All parts but plan and keys, which lie within form, add up to control."""
    last = {mark["what"]: mark["at"] for mark in line["marks"]}
    first: dict[str, float] = {}
    for mark in line["marks"]:
        first.setdefault(mark["what"], mark["at"])
    seen, resumed = first["condemned"], line["agents_marks"]["resume"][1]
    told = line["agents_marks"]
    return {
        "detection": seen - line["lost_at"],
        "fence": last["PLACING"] - seen,
        "place": last["FORMING"] - last["PLACING"],
        "plan": told["plan"][1] - last["FORMING"],
        "keys": told["keys"][1] - told["posted"][0],
        "form": last["RESTORING"] - last["FORMING"],
        "restore": last["RUNNING"] - last["RESTORING"],
        "resume": resumed - last["RUNNING"],
        "control": resumed - seen,
        "total": resumed - line["lost_at"],
    }


def losses_table(results: Results) -> str:
    head = ("devices", "nodes lost", "how", "detection (ms)", *(f"{part} (ms)" for part in PARTS))
    head = (*head, "after detection (ms)", "CPU of the manager (s)", "messages per agent, in + out", "bytes, in + out")
    rows = []
    for loss in results.losses:
        counts = loss.per_agent
        rows.append(
            [
                f"{loss.devices:,}", str(loss.nodes), loss.how, f"{1e3 * loss.median('detection'):.0f}",
                *(f"{1e3 * loss.median(part):.0f}" for part in PARTS), f"**{1e3 * loss.median('control'):.0f}**",
                f"{statistics.median(loss.cpu_s):.2f}",
                f"{counts['messages in']:.0f} + {counts['messages out']:.0f}" if counts else "",
                f"{counts['bytes in']:.0f} + {counts['bytes out']:.0f}" if counts else "",
            ]
        )  # fmt: skip
    return markdown(head, rows)


def quiet_table(results: Results) -> str:
    starts = {start.devices: start for start in results.starts}
    head = ("devices", "agents", "heartbeats a second", "CPU of the manager (of one core)",
            "memory of the manager (MB)", "first start (s)", "its CPU (s)")  # fmt: skip
    rows = [
        [
            f"{one.devices:,}", f"{one.agents:,}", f"{one.beats_per_s:,.0f}", f"{one.cpu:.0%}",
            f"{one.rss_bytes / 1e6:.0f}", f"{starts[one.devices].seconds:.1f}", f"{starts[one.devices].cpu_s:.1f}",
        ]
        for one in results.quiet
    ]  # fmt: skip
    return markdown(head, rows)


def model_table(results: Results) -> str:
    head = ("devices", "detection", "control plane", "start", "links", "copy", "half a step", "**total (s)**",
            "the paper's total (s)", "time-out, requeue, checkpoint (s)")  # fmt: skip
    paper = {devices: total for _, devices, _, _, _, total in model.PAPER}
    rows = [
        [
            f"{devices:,}", f"{ours.detection:.1f}", f"{ours.control:.1f}", f"{ours.start:.0f}", f"{ours.links:.1f}",
            f"{ours.copy:.1f}", f"{ours.half_step:.1f}", f"**{ours.total:.0f}**",
            f"{paper[devices]:g}" if devices in paper else "", f"{other:.0f}",
        ]
        for devices, ours, other in model.figures(measured(results))
    ]  # fmt: skip
    return markdown(head, rows)


def assumptions_table() -> str:
    rows = [[name, f"{one.value:g} {one.unit}", one.what] for name, one in model.ASSUMED.items()]
    return markdown(("assumed", "value", "what it stands for"), rows)


def measured(results: Results) -> list[tuple[int, float, float]]:
    """(devices, detection, control) of one node that falls silent."""
    return [
        (loss.devices, loss.median("detection"), loss.median("control"))
        for loss in results.losses
        if (loss.nodes, loss.how) == (1, "silence")
    ]


def markdown(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def tables(results: Results) -> dict[str, str]:
    """By the name of its file; each also stands on the page."""
    return {
        "scale.md": losses_table(results),
        "scale-quiet.md": quiet_table(results),
        "scale-model.md": model_table(results),
        "scale-assumptions.md": assumptions_table(),
    }


def begin(name: str) -> str:
    return f"<!-- table: benchmarks/results/{name} -->"


def save(results: Results, folder: Path = RESULTS, page: Path = PAGE) -> None:
    """JSON, Markdown, plot, and the tables on the page."""
    (folder / "scale.json").write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
    for name, text in tables(results).items():
        (folder / name).write_text(text)
        put_table(page, begin(name), END, text)
    plot(results, folder / "scale.svg")


def plot(results: Results, path: Path) -> None:
    """Left: the control plane, measured. Right: the model beside the paper. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for nodes, how in sorted({(loss.nodes, loss.how) for loss in results.losses}):
        points = sorted(
            (loss.devices, loss.median("control")) for loss in results.losses if (loss.nodes, loss.how) == (nodes, how)
        )
        label = f"{nodes} node{'s' if nodes > 1 else ''}, {how}"
        left.plot(*zip(*points, strict=True), "o-", label=label)
    left.set_ylabel("s from verdict to resume (control plane)")
    ours = model.figures(measured(results))
    right.plot([d for d, _, _ in ours], [one.total for _, one, _ in ours], "o-", label="ours: measured + assumed")
    right.plot([row[1] for row in model.PAPER], [row[5] for row in model.PAPER], "s", label="the paper, measured")
    right.plot([d for d, _, _ in ours], [other for _, _, other in ours], "--", label="time-out, requeue, checkpoint")
    right.set_ylabel("s from failure to new training")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("devices")
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
