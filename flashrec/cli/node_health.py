"""`flashrec node-health`: the checks of this node, for people, for programs and, with --slurm, for slurmd."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashrec.admin.health import program
from flashrec.health import CheckFileError, Plan, Report, Status, load_plan, run_checks
from flashrec.health.catalog import available, check_directory, command_of
from flashrec.slurm.cli import CliScheduler
from flashrec.slurm.scheduler import SlurmError

EXIT_USAGE = 2
COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.UNKNOWN: "yellow", Status.FAIL: "red"}


@click.command("node-health", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", type=click.Path(path_type=Path), help="Check file.  [default: /etc/flashrec/node-health.conf]"
)
@click.option("--node", help="Slurm's name of this node.  [default: as slurmd says, else the host name]")
@click.option("--only", multiple=True, metavar="NAME", help="Run only this check; may be repeated.")
@click.option("--list", "list_only", is_flag=True, help="Read the check file, show what it asks for, run nothing.")
@click.option("--json", "as_json", is_flag=True, help="The report for programs.")
@click.option(
    "--slurm", is_flag=True, help="What flashrec-node-health runs as root: may drain this node. Always exit 0."
)
def node_health(
    config: Path | None, node: str | None, only: tuple[str, ...], list_only: bool, as_json: bool, slurm: bool
) -> None:
    """Check whether this node is fit for a job: GPUs, network, memory, disks, clock, mounts, processes.

    Nothing is changed. What needs root to be looked at is `unknown` for others. Exit code 0: nothing failed (warnings
    and unknowns included), 1: a check failed, 2: wrong usage or a check file that cannot be used.

    \b
    Examples:
      flashrec node-health
      flashrec node-health --only gpu --json
      flashrec node-health --config ./new.conf --list
    """
    if slurm:
        raise SystemExit(program.main(config, CliScheduler()))
    try:
        plan = load_plan(config)
        _check_names(plan, only)
        if list_only:
            _show_plan(plan, as_json)
            return
        name = node or this_node()
        report = asyncio.run(run_checks(plan, name, features=_features(plan, name), only=only))
    except CheckFileError as err:
        click.echo(f"flashrec node-health: {err}", err=True)
        raise SystemExit(EXIT_USAGE) from err
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        _show(report, plan)
    raise SystemExit(1 if report.status is Status.FAIL else 0)


def this_node() -> str:
    """Slurm's name if slurmd or the manager told us, else the host name without its domain."""
    return (
        os.environ.get("FLASHREC_NODE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    )


def _check_names(plan: Plan, only: tuple[str, ...]) -> None:
    known = {line.check for line in plan.lines}
    for name in only:
        if name not in known:
            raise CheckFileError(f"{plan.source} has no check {name}; it has: {', '.join(sorted(known))}")


def _features(plan: Plan, node: str) -> tuple[str, ...] | None:
    """None if no line needs them, or Slurm does not tell."""
    if not plan.needs_features:
        return None

    async def ask() -> tuple[str, ...]:
        async with asyncio.timeout(plan.settings.slurm_timeout_s):
            return (await CliScheduler().nodes([node]))[node].features

    try:
        return asyncio.run(ask())
    except (SlurmError, TimeoutError):
        return None


def _show_plan(plan: Plan, as_json: bool) -> None:
    directory = check_directory(plan)
    for line in plan.lines:
        command_of(line, directory, plan.source)
    if as_json:
        click.echo(msgspec.json.encode(plan).decode())
        return
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in ("line", "nodes", "check", "time limit", "if hung", "if unknown"):
        table.add_column(column)
    for line in plan.lines:
        cells = (str(line.line), " ".join(line.terms), line.label, f"{line.timeout_s:g} s", line.when_hung)
        table.add_row(*map(escape, cells), line.when_unknown)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(plan.source)}[/] · checks in {escape(str(directory))}", table, sep="\n")
    console.print(f"[dim]installed: {escape(', '.join(available(directory)))}[/]")


def _show(report: Report, plan: Plan) -> None:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in ("check", "verdict", "time", "reason"):
        table.add_column(column, justify="right" if column == "time" else "left")
    for finding in report.findings:
        status = finding.verdict.status
        verdict = f"[{COLOURS[status]}]{status}[/]"
        table.add_row(escape(finding.label), verdict, f"{finding.seconds:.2f} s", escape(finding.verdict.reason))
    console = Console(highlight=False, soft_wrap=True)
    head = f"[bold]node {escape(report.node)}: [{COLOURS[report.status]}]{report.status}[/][/] · {escape(plan.source)}"
    console.print(head, table if report.findings else "no check is for this node", sep="\n")
