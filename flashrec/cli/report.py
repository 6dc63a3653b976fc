"""`flashrec report`: what happened in each recovery of a job, as a table, as JSON or as an HTML page."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashrec.report.html import render_html
from flashrec.report.records import read_faults, read_journal
from flashrec.report.text import LABELS, MEANINGS, bar, details, headline, mirrors, seconds, total_s
from flashrec.report.timeline import Recovery, Timeline, build_timeline

BAR_WIDTH = 36
NARROWEST = 110  # columns; a log file has no width of its own
COLOURS = {
    "detect": "red", "fence": "yellow", "hand_over": "magenta", "launch": "yellow", "form": "green", "restore": "cyan",
}  # fmt: skip


def load_timeline(job_dir: Path, faults_path: Path | None) -> Timeline:
    """Read a job directory; click's error, with what to do, if there is no journal in it."""
    path = job_dir / "journal.jsonl"
    try:
        journal = read_journal(path.read_bytes())
    except FileNotFoundError:
        raise click.ClickException(
            f"no journal.jsonl in {job_dir}: give the directory that `flashrec run` made, ./flashrec-JOBID by default"
        ) from None
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror}") from error
    candidates = [faults_path] if faults_path else [job_dir / "faults.jsonl", job_dir / "faults" / "faults.jsonl"]
    content = next((candidate.read_bytes() for candidate in candidates if candidate.is_file()), b"")
    return build_timeline(journal, read_faults(content, journal))


def print_recovery(console: Console, recovery: Recovery) -> None:
    """Headline, bars of the phases, moments, and the rest."""
    console.print(f"\n[bold]{escape(headline(recovery))}[/bold]")
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    total = total_s(recovery)
    for name, value in recovery.durations.items():
        spans = [span for span in recovery.spans if span.name == name]
        style = COLOURS.get(name, "magenta")
        table.add_row(
            LABELS[name], f"[{style}]{bar(spans, total, BAR_WIDTH)}[/]", seconds(value), f"[dim]{MEANINGS[name]}[/]"
        )
    console.print(table)
    moments = (f"{mark.name} {mark.after_s:+.3f}" for mark in sorted(recovery.marks, key=lambda mark: mark.mono))
    rows = Table.grid(padding=(0, 1))
    rows.add_row("moments", " · ".join(moments) + f"   [dim](s from {recovery.rto_from})[/]")
    for label, text in details(recovery):
        rows.add_row(label, escape(text))
    console.print(rows)


def print_timeline(console: Console, timeline: Timeline) -> None:
    job = "unknown" if timeline.job_id is None else timeline.job_id
    started = timeline.started or "unknown"
    console.print(f"[bold]Job {job}[/bold], journal from {started}, training after {seconds(timeline.start_s)}")
    for recovery in timeline.recoveries:
        print_recovery(console, recovery)
    if not timeline.recoveries:
        console.print("No recovery: nothing failed.")
    for straggler in timeline.stragglers:
        console.print(f"[yellow]Straggler[/] {escape(straggler)}")
    if text := mirrors(timeline.mirrors):
        console.print(f"Mirrors {escape(text)}")
    code = "" if timeline.exit_code is None else f" (exit code {timeline.exit_code})"
    console.print(f"\nEnd: {escape(timeline.outcome)}{code}")
    if timeline.is_torn:
        console.print("[yellow]The last line of the journal is cut: its writer was ended in the middle of it.[/]")
    if timeline.unreadable_lines:
        numbers = ", ".join(map(str, timeline.unreadable_lines))
        console.print(f"[red]Lines of the journal that cannot be read: {numbers}. Figures may be incomplete.[/]")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job_dir", type=click.Path(path_type=Path, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="The same as data, for programs: seconds, null for unknown.")
@click.option("--html", "html_path", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with charts.")
@click.option(
    "--faults",
    "faults_path",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="When faults were injected (flashrec.testing).  [default: faults.jsonl or faults/faults.jsonl in JOB_DIR]",
)
def report(job_dir: Path, as_json: bool, html_path: Path | None, faults_path: Path | None) -> None:
    """Show the timeline of every recovery of a job: detect, fence, launch, form, restore, first new step.

    JOB_DIR is the job's directory, ./flashrec-JOBID by default. It works while the job runs, and after a crash.

    \b
    Examples:
      flashrec report flashrec-4711
      flashrec report flashrec-4711 --html recovery.html
      flashrec report flashrec-4711 --json | jq '.recoveries[].rto_s'
    """
    timeline = load_timeline(job_dir, faults_path)
    if html_path is not None:
        try:
            html_path.write_text(render_html(timeline, f"Recoveries of job {timeline.job_id or job_dir.name}"))
        except OSError as error:
            raise click.ClickException(f"cannot write {html_path}: {error.strerror}") from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(timeline), indent=1).decode())
    elif html_path is None:
        console = Console(highlight=False)
        console.width = max(console.width, NARROWEST)
        print_timeline(console, timeline)
    else:
        click.echo(f"wrote {html_path}")
