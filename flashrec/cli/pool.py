"""`flashrec pool`: the pool of spare nodes, for administrators."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashrec.admin import pool_sync
from flashrec.admin.pool import PoolConfig, PoolFacts, served_job, wanted_size
from flashrec.admin.pool_sync import PoolError
from flashrec.slurm.cli import CliScheduler
from flashrec.slurm.scheduler import Scheduler, SlurmError

DEFAULT_PLUGSTACK = Path("/etc/slurm/plugstack.conf")


class Context(msgspec.Struct, frozen=True):
    config: PoolConfig
    limits: dict[str, str]
    scheduler: Scheduler


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--plugstack", type=click.Path(path_type=Path), help=f"Holds our line.  [default: {DEFAULT_PLUGSTACK}]")
@click.option("--name", help="The pool's reservation.  [default: pool= of that line, else flashspare]")
@click.option("--feature", help="Feature of its nodes.  [default: feature= of that line, else flashspare]")
@click.option("--size", type=click.IntRange(min=0), help="Nodes to hold.  [default: size=, else all with the feature]")
@click.option(
    "--substitutes", help="Feature of nodes that may stand in while idle.  [default: substitutes=, else none]"
)
@click.option("--users", help="Who may use it, as Slurm's Users=.  [default: -daemon, that is everybody]")
@click.pass_context
def pool(
    ctx: click.Context,
    plugstack: Path | None,
    name: str | None,
    feature: str | None,
    size: int | None,
    substitutes: str | None,
    users: str | None,
) -> None:
    """Keep nodes as spares for the jobs of a whole cluster.

    The pool is a reservation of the nodes with one feature. Jobs get nodes from it only through flashrec, if the site's
    job_submit.lua calls ours (slurm_plugin/lua). See docs/admin/pools.md.

    \b
    Examples:
      flashrec pool sync --dry-run
      flashrec pool --size 4 sync
      flashrec pool status
      flashrec pool drain n17 "fan"
    """
    base = PoolConfig()
    path = plugstack or DEFAULT_PLUGSTACK
    try:
        if plugstack is not None or path.exists():
            base = pool_sync.read_config(path, base)
    except PoolError as err:
        raise click.ClickException(str(err)) from err
    given = tuple(users.split(",")) if users else None
    config = pool_sync.override(base, name=name, feature=feature, size=size, substitutes=substitutes, users=given)
    ctx.obj = Context(config, pool_sync.site_limits(path), CliScheduler())


@pool.command()
@click.option("--dry-run", is_flag=True, help="Say what would be done and do nothing.")
@click.pass_obj
def sync(context: Context, dry_run: bool) -> None:
    """Bring the reservation in order: nodes, size, users, flags; cancel companion jobs whose job has ended.

    Needs root or a Slurm operator. Run it every minute (slurm_plugin/systemd). Exit code 0: the pool is as it should
    be; 1: something could not be done, or too few nodes are usable; the rest was done.
    """
    raise SystemExit(0 if _sync(context, dry_run) else 1)


def _sync(context: Context, dry_run: bool = False) -> bool:
    try:
        with pool_sync.alone(context.config.name):
            return bool(
                _ask(
                    lambda: pool_sync.sync(context.scheduler, context.config, time.time(), click.echo, dry_run=dry_run)
                )
            )
    except PoolError as err:
        raise click.ClickException(str(err)) from err


@pool.command()
@click.argument("node")
@click.argument("why", default="by hand")
@click.pass_obj
def drain(context: Context, node: str, why: str) -> None:
    """Take NODE out of the pool: drain it, then let another one take its place."""
    _ask(lambda: pool_sync.take_out(context.scheduler, context.config, node, why))
    click.echo(f"node {node} is drained; `flashrec pool return {node}` undoes that")
    _sync(context)


@pool.command("return")
@click.argument("node")
@click.pass_obj
def return_(context: Context, node: str) -> None:
    """Put NODE back that `drain` took out. A node drained for another reason is not touched."""
    _ask(lambda: pool_sync.put_back(context.scheduler, context.config, node))
    click.echo(f"node {node} is not drained any more")
    _sync(context)


@pool.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_obj
def status(context: Context, as_json: bool) -> None:
    """Show the pool's nodes, who uses them, and the limits. Exit code 3 if there is no pool."""
    facts = _ask(lambda: pool_sync.gather(context.scheduler))
    shown = picture(context, facts)
    if as_json:
        click.echo(json.dumps(shown, indent=1))
    else:
        _print(shown)
    raise SystemExit(0 if shown["exists"] else 3)


def picture(context: Context, facts: PoolFacts) -> dict[str, Any]:
    """Plain data: the pool, its nodes, its companion jobs."""
    config = context.config
    held = facts.reservation(config.name)
    members = set(held.nodes) if held else set()
    holders = {node: job for job in facts.jobs if served_job(job) is not None for node in job.nodes}
    rows = []
    for name, node in sorted(facts.nodes.items()):
        job = holders.get(name)
        if name in members or config.feature in node.features or job:
            rows.append(
                {
                    "node": name,
                    "in_pool": name in members,
                    "state": "+".join(sorted(node.states)),
                    "companion": job.job_id if job else None,
                    "serves": served_job(job) if job else None,
                    "user": job.user_name if job else None,
                    "reason": node.reason or None,
                }
            )
    usable = sum(facts.nodes[name].is_usable for name in members if name in facts.nodes)
    free = sum(
        bool(row["in_pool"]) and facts.nodes[str(row["node"])].is_usable and not row["companion"] for row in rows
    )
    return {
        "pool": config.name, "exists": held is not None, "wanted": wanted_size(config, facts), "usable": usable,
        "free": free, "limits": context.limits, "nodes": rows,
    }  # fmt: skip


def _print(shown: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not shown["exists"]:
        console.print(f"there is no reservation {shown['pool']}; `flashrec pool sync` makes it")
    else:
        limits = " ".join(f"{key}={value}" for key, value in shown["limits"].items())
        counts = f"{shown['usable']} of {shown['wanted']} nodes usable, {shown['free']} free"
        console.print(f"[bold]pool {escape(shown['pool'])}[/bold] · {counts} · {escape(limits or 'default limits')}")
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in ("node", "in pool", "state", "companion", "serves", "user", "reason"):
        table.add_column(column)
    for row in shown["nodes"]:
        words = ["yes" if value is True else "no" if value is False else str(value or "-") for value in row.values()]
        table.add_row(*map(escape, words))
    console.print(table)


def _ask(question: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run one question to Slurm; what goes wrong becomes one line and exit code 1."""
    try:
        return asyncio.run(question())
    except TimeoutError:
        raise click.ClickException(f"Slurm took longer than {pool_sync.SYNC_TIMEOUT_S:g} s; nothing is lost") from None
    except (SlurmError, PoolError, ValueError) as err:
        raise click.ClickException(str(err)) from err
