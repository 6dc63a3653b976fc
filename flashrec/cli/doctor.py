"""`flashrec doctor`: what is wrong with an installation, and what to do about it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from ClusterShell.NodeSet import NodeSet
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashrec.admin.doctor.examine import examine, examine_node, only_here, our_line
from flashrec.admin.doctor.finding import Finding, Status, exit_code
from flashrec.admin.doctor.nodes import JOB_TIMEOUT_S, look_at_nodes, print_report
from flashrec.config.load import ConfigError, load_config
from flashrec.slurm.cli import CliScheduler
from flashrec.slurm.command import Commands
from flashrec.slurm.hostlist import expand

CALL_TIMEOUT_S = 10.0
COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.UNKNOWN: "magenta"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nodes", metavar="NODELIST", help="Look at these nodes too, through one short job.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Configuration that jobs will use.")
@click.option("--quiet", is_flag=True, help="Only what is not ok.")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
@click.option("--local-only", is_flag=True, hidden=True)
@click.option("--proof", hidden=True, default="")
def doctor(
    *, nodes: str | None, config_file: Path | None, quiet: bool, as_json: bool, local_only: bool, proof: str
) -> None:
    """Check that Slurm, the plugin, the pool and this machine are ready, and say what to do where they are not.

    Looks and changes nothing. Run it on a login node, on the controller (which alone has job_submit.lua) and, with
    --nodes, on nodes. Exit code 1 if anything fails, else 0; what could not be looked at is `unknown`.

    \b
    Examples:
      flashrec doctor
      flashrec doctor --nodes n[1-4]
      flashrec doctor --json | jq '.findings[] | select(.status != "ok")'
    """
    commands = Commands(CALL_TIMEOUT_S)
    scheduler = CliScheduler(commands)
    if local_only:
        report = asyncio.run(examine_node(scheduler, commands, os.environ, proof))
        click.echo(print_report(report), nl=False)
        return
    try:
        port = load_config(config_file).control.port
        names = expand(nodes) if nodes else ()
    except (ConfigError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    found = asyncio.run(_all(scheduler, commands, names, port))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"findings": found, "summary": counts(found)})).decode())
    else:
        show(found, quiet)
    raise SystemExit(exit_code(found))


async def _all(scheduler: CliScheduler, commands: Commands, names: Sequence[str], port: int) -> list[Finding]:
    found, facts = await examine(scheduler, commands, os.environ, port)
    if not names:
        return [*found, only_here()]
    line = our_line(facts)
    flashrec = (line.argument("flashrec") if line else None) or shutil.which("flashrec") or _beside_python()
    return found + await look_at_nodes(Commands(JOB_TIMEOUT_S), names, flashrec, os.environ, Path.cwd())


def _beside_python() -> str:
    """The flashrec of the environment that runs us, which need not be in PATH."""
    return str(Path(sys.executable).with_name("flashrec"))


def counts(found: Sequence[Finding]) -> dict[str, int]:
    return {str(status): sum(finding.status is status for finding in found) for status in Status}


def show(found: Sequence[Finding], quiet: bool) -> None:
    """One row a verdict; nodes that say the same share a row."""
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding, nodes in merged(found):
        if quiet and finding.status is Status.OK:
            continue
        what = f"{nodes}: {finding.what}" if nodes else finding.what
        advice = f"\n[bold]do:[/] {escape(finding.do)}" if finding.do and finding.status is not Status.OK else ""
        colour = COLOURS[finding.status]
        table.add_row(f"[{colour}]{finding.status}[/]", escape(finding.check), escape(what) + advice)
    if table.row_count:
        console.print(table)
    console.print(", ".join(f"{number} {status}" for status, number in counts(found).items() if number))


def merged(found: Sequence[Finding]) -> list[tuple[Finding, str]]:
    """Findings that differ only in their node, with the nodes folded: n[1-4]."""
    together: dict[Finding, list[str]] = {}
    for finding in found:
        together.setdefault(msgspec.structs.replace(finding, node=""), []).append(finding.node)
    return [(finding, str(NodeSet.fromlist([n for n in nodes if n]))) for finding, nodes in together.items()]
