"""`flashrec faulty|replace|drain|drop|extend`: what the user of a running job, or an operator, can do about its nodes.

JOB is the number of a Slurm job or its job directory. What concerns the running job is asked of its manager, through
the job directory; what concerns Slurm is asked of Slurm, with the rights of whoever calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashrec.admin.pool import served_job
from flashrec.manager.wishes import Ask, ask
from flashrec.slurm.cli import CliScheduler
from flashrec.slurm.command import Commands
from flashrec.slurm.hostlist import compress
from flashrec.slurm.scheduler import JobInfo, NodeInfo, SlurmError

ANSWER_TIMEOUT_S = 15.0
_BAD = frozenset({"DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "ERROR", "UNKNOWN"})
_HELP = {"help_option_names": ["-h", "--help"]}


def job_directory(job: str) -> Path | None:
    """The directory that JOB names: itself, or the newest flashrec-JOB* here; None if there is none."""
    path = Path(job)
    if not job.isdigit():
        return path if (path / "status.json").is_file() else None
    found = [p for p in (Path(f"flashrec-{job}"), *Path().glob(f"flashrec-{job}.*")) if (p / "status.json").is_file()]
    return max(found, key=lambda p: (p / "status.json").stat().st_mtime, default=None)


def job_number(job: str) -> int | None:
    """The Slurm job that JOB names; None if it is a directory of a job without Slurm."""
    if job.isdigit():
        return int(job)
    number = _status(job).get("job_id")
    return number if isinstance(number, int) else None


def _status(job: str) -> dict[str, Any]:
    folder = job_directory(job)
    if folder is None:
        return {}
    try:
        return msgspec.json.decode((folder / "status.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as err:
        raise click.ClickException(f"cannot read {folder / 'status.json'}: {err}") from err


@click.command(context_settings=_HELP)
@click.argument("job")
def faulty(job: str) -> None:
    """List the nodes of JOB that are failing, as Slurm and as the job's manager see them.

    Nodes of its companion jobs too. Exit code 0: none; 3: there are some.
    """
    rows = _run(_slurms_view(job_number(job)))
    for node in _status(job).get("nodes", []):
        if node.get("state") in ("dead", "suspect"):
            rows.setdefault(str(node["node"]), ["-", "-"])
            rows[str(node["node"])] += [f"{node['state']}: {node.get('lost_because') or 'silent'}"]
    if not rows:
        click.echo(f"job {job}: no node is failing")
        return
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in ("node", "Slurm says", "reason", "the manager says"):
        table.add_column(column)
    for name, cells in sorted(rows.items()):
        table.add_row(*(escape(text) for text in [name, *cells, "-"][:4]))
    Console(highlight=False, soft_wrap=True).print(table)
    raise SystemExit(3)


async def _slurms_view(job_id: int | None) -> dict[str, list[str]]:
    """Failing nodes: state words and reason."""
    if job_id is None:
        return {}
    scheduler = CliScheduler()
    main = await scheduler.job(job_id)
    names = {name for job in [main, *await _companions(scheduler, main)] for name in job.nodes}
    nodes: dict[str, NodeInfo] = await scheduler.nodes(sorted(names)) if names else {}
    return {
        name: ["+".join(sorted(node.states)), node.reason or "-"] for name, node in nodes.items() if node.states & _BAD
    }


async def _companions(scheduler: CliScheduler, main: JobInfo) -> list[JobInfo]:
    jobs = await scheduler.jobs(user=str(main.user_id))
    return [job for job in jobs if served_job(job) == main.job_id and job.user_id == main.user_id]


@click.command(context_settings=_HELP)
@click.argument("job")
@click.argument("node")
@click.option("--reason", default="", help="For the journal.")
@click.option("--now", is_flag=True, help="Do not wait for the spare and a step boundary: at most one step is redone.")
def replace(job: str, node: str, reason: str, now: bool) -> None:
    """Move the ranks of NODE to a spare, and use NODE no more in this job.

    A planned swap: the spare's workers start while training goes on, then all ranks pause at the end of a step, and no
    step is lost. Refused if there is no spare and no pool to ask.
    """
    _ask_manager(job, Ask("replace", node, reason, now))


@click.command(context_settings=_HELP)
@click.argument("job")
@click.argument("node")
@click.argument("reason")
def drain(job: str, node: str, reason: str) -> None:
    """Move the ranks of NODE to a spare, as `replace` does, and report it as bad, with a REASON for the administrators.

    Slurm drains it when the job has ended, if the site lets jobs' reports do that (drain=user) and its epilog
    finds that the node was the job's.
    """
    _ask_manager(job, Ask("drain", node, reason))


@click.command(context_settings=_HELP)
@click.argument("job")
@click.argument("node")
def drop(job: str, node: str) -> None:
    """Give NODE, an idle spare of JOB, back to Slurm.

    Slurm takes it from the job (22.05 without accounting can do that once per job, and may give that node no work
    until `scontrol reconfigure` if the site has an Epilog); one that came from the pool goes back there.
    """
    _ask_manager(job, Ask("drop", node))
    number = job_number(job)
    if number is not None:
        click.echo(_run(_give_back(number, node)))


async def _give_back(job_id: int, node: str) -> str:
    scheduler = CliScheduler()
    main = await scheduler.job(job_id)
    for job in await _companions(scheduler, main):
        if node in job.nodes:
            await scheduler.cancel(job.job_id)
            return f"companion job {job.job_id} is cancelled"
    if node not in main.nodes:
        return f"node {node} has left job {job_id} already"
    rest = compress(name for name in main.nodes if name != node)
    await Commands().call("scontrol", "update", f"jobid={job_id}", f"nodelist={rest}")
    return f"job {job_id} has nodes {rest} now"


def _ask_manager(job: str, wish: Ask) -> None:
    folder = job_directory(job)
    if folder is None:
        raise click.ClickException(f"no job directory of {job} here: name the directory (it holds status.json)")
    try:
        answer = ask(folder, wish, ANSWER_TIMEOUT_S)
    except TimeoutError as err:
        raise click.ClickException(str(err)) from err
    except (OSError, msgspec.DecodeError) as err:
        raise click.ClickException(f"cannot ask the manager of {folder}: {err} (only the job's user can)") from err
    if not answer.is_done:
        raise click.ClickException(answer.said)
    click.echo(answer.said)


@click.command(context_settings=_HELP)
@click.argument("job")
@click.argument("minutes", type=click.IntRange(1, 100000))
def extend(job: str, minutes: int) -> None:
    """Give JOB and its companion jobs MINUTES more. For operators: Slurm lets nobody else raise a time limit.

    Users get more time by the site's policy, after each replacement from the pool (extend= and delay= in
    plugstack.conf).
    """
    number = job_number(job)
    if number is None:
        raise click.ClickException(f"{job} is not a Slurm job")
    for job_id, limit in _run(_extend(number, minutes)):
        click.echo(f"job {job_id}: time limit {limit} min")


async def _extend(job_id: int, minutes: int) -> list[tuple[int, int]]:
    scheduler = CliScheduler()
    main = await scheduler.job(job_id)
    changed = []
    for job in [main, *await _companions(scheduler, main)]:
        if job.time_limit_s is not None:
            limit = int(job.time_limit_s // 60) + minutes
            await scheduler.set_time_limit(job.job_id, limit)
            changed.append((job.job_id, limit))
    if not changed:
        raise SlurmError(f"job {job_id} has no time limit")
    return changed


def _run(question: Coroutine[Any, Any, Any]) -> Any:
    try:
        return asyncio.run(question)
    except (SlurmError, ValueError) as err:
        raise click.ClickException(str(err)) from err
