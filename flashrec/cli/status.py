"""`flashrec status`: what a job is doing now, from its directory; asks no process and no Slurm."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashrec.report.records import Line, read_journal

STALE_AFTER_S = 5.0
STATE_COLOURS = {"alive": "green", "suspect": "yellow", "dead": "red", "left": "dim"}


def newest_job_dir(here: Path) -> Path:
    """The job directory below `here` that was written to last."""
    found = sorted(here.glob("flashrec-*/status.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise click.ClickException(f"no flashrec-*/status.json below {here}: name the job directory")
    return found[-1].parent


def describe(line: Line) -> str:
    """One line of the journal for people; '' for what only programs care about."""
    match line.kind:
        case "phase":
            return f"{line.before} -> {line.after}: {line.reason}"
        case "verdict":
            return f"{line.subject} is {line.state}: {line.reason}"
        case "note":
            return line.what
        case "effect" if line.effect_type == "Tell":
            return str(line.effect.get("text", ""))
        case "effect" if line.effect_type != "AnnounceFence":
            return f"{line.effect_type}: {line.effect.get('reason', '')}".removesuffix(": ")
        case "event" if line.event_type in ("NodeGranted", "NodeRefused"):
            return f"{line.event_type}: {line.event.get('node') or line.event.get('reason', '')}"
        case "event" if line.event_type == "NodesCondemned":
            verdicts = line.event.get("verdicts", [])
            said = "; ".join(f"{one.get('node')}: {one.get('reason')}" for one in verdicts)
            return f"NodesCondemned: {said}"
        case "event" if line.event_type in (
            "WorkerExited",
            "NodeCondemned",
            "NodeLeaving",
            "NodeLeft",
            "NodeMended",
            "LaunchFailed",
            "StopRequested",
        ):
            subject = line.event.get("node") or f"rank {line.event.get('rank', '?')}"
            return f"{line.event_type}: {subject}: {line.event.get('reason', '')}"
    return ""


def is_running(status: dict[str, Any], age_s: float) -> bool:
    return status.get("phase") != "STOPPED" and age_s < STALE_AFTER_S


def headline(status: dict[str, Any], age_s: float) -> str:
    """One line: job, phase, generation, step, and whether this is news."""
    step = status.get("step")
    parts = [
        f"job {status.get('job_id') or 'without Slurm'}",
        str(status.get("phase", "phase unknown")),
        f"generation {status.get('generation', 'unknown')}",
        f"step {'unknown' if step is None else step}",
    ]
    if status.get("pool"):
        parts.append(f"pool: {status['pool']}")
    if status.get("phase") == "STOPPED":
        parts.append(f"exit code {status.get('exit_code')}: {status.get('stop_reason', '')}")
    elif age_s >= STALE_AFTER_S:
        parts.append(f"written {age_s:.0f} s ago: the manager is gone or cannot write")
    return " · ".join(parts)


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Whatever columns the rows have; lists joined, None as a dash."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(cell(column, row.get(column)) for column in columns))
    return table


def cell(column: str, value: Any) -> str:
    if value is None or value == "":
        return "[dim]-[/]"
    text = escape(" ".join(map(str, value)) if isinstance(value, list) else str(value))
    colour = STATE_COLOURS.get(text) if column in ("state", "fabric") else None
    return f"[{colour}]{text}[/]" if colour else text


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job_dir", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("--lines", default=8, show_default=True, help="How many of the newest journal lines to show.")
@click.option("--json", "as_json", is_flag=True, help="The manager's status as it is, for programs.")
def status(job_dir: Path | None, lines: int, as_json: bool) -> None:
    """Show a running job: phase, step, nodes, ranks, and what happened last.

    JOB_DIR is the job's directory; without it, the newest ./flashrec-* here. Exit code 0 while the job runs, 3 when
    it is over or its manager no longer writes.

    \b
    Examples:
      flashrec status
      watch -n1 flashrec status flashrec-4711
    """
    job_dir = job_dir or newest_job_dir(Path.cwd())
    path = job_dir / "status.json"
    try:
        content, age_s = path.read_bytes(), time.time() - os.stat(path).st_mtime
        now: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
    except FileNotFoundError:
        raise click.ClickException(
            f"no status.json in {job_dir}: the job has not started, or this is another directory"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise click.ClickException(f"cannot read {path}: {error}") from error
    if as_json:
        click.echo(content.decode())
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"[bold]{escape(headline(now, age_s))}[/bold]")
        for name, rows in now.items():
            if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
                console.print(f"\n[bold]{escape(name)}[/bold]")
                console.print(table_of(rows))
        print_tail(console, job_dir / "journal.jsonl", lines)
    raise SystemExit(0 if is_running(now, age_s) else 3)


def print_tail(console: Console, path: Path, lines: int) -> None:
    """The newest `lines` lines of the journal that say something to people."""
    if not path.is_file() or lines < 1:
        return
    told = [(line, describe(line)) for line in read_journal(path.read_bytes()).lines]
    console.print("\n[bold]last[/bold]")
    for line, text in [pair for pair in told if pair[1]][-lines:]:
        moment = datetime.fromisoformat(line.wall).astimezone().strftime("%H:%M:%S.%f")[:-3]
        console.print(f" [dim]{moment}[/] {escape(text)}")
