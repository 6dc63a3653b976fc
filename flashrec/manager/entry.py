"""From a request to a running manager: find out where we are, refuse what cannot work, make the job directory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from flashrec.manager.allocation import inspect_allocation
from flashrec.manager.app import Manager
from flashrec.manager.descriptors import make_room
from flashrec.manager.output_files import OutputFiles
from flashrec.manager.request import Request, RequestError, Shape, shape
from flashrec.manager.voice import say
from flashrec.slurm.choice import make_scheduler
from flashrec.slurm.client import SlurmClient


def run(request: Request) -> int:
    """Run the job; return its exit code. Raises RequestError for what the user can mend."""
    return asyncio.run(_run(request))


async def _run(request: Request) -> int:
    if not request.command:
        raise RequestError("no command: flashrec run [options] -- python train.py …")
    if request.local_nodes:
        if request.config.pool.reservation:
            raise RequestError("a pool is a reservation of Slurm: without Slurm there is none (--local with --pool)")
        nodes = tuple(f"local{index}" for index in range(request.local_nodes))
        made = shape(request, len(nodes), {})
        files = _output_files(request, made, len(nodes))
        job_dir = _job_dir(request, "local")
        return await _manager(request, made, nodes, job_dir, "127.0.0.1", None, files).run()
    try:
        make_scheduler(os.environ)  # starts nothing; a wrong choice is refused before anything else is
    except ValueError as err:
        raise RequestError(str(err)) from err
    allocation = await inspect_allocation(SlurmClient(), os.environ)
    for warning in allocation.warnings:
        say(f"warning: {warning}")
    made = shape(request, len(allocation.nodes), os.environ)
    files = _output_files(request, made, len(allocation.nodes))
    job_dir = _job_dir(request, str(allocation.job_id))
    manager = _manager(request, made, allocation.nodes, job_dir, allocation.manager_address, allocation.job_id, files)
    return await manager.run()


def _output_files(request: Request, made: Shape, num_nodes: int) -> OutputFiles | None:
    """Open them all, if there are to be any. From here on there is room for them and for a connection of each node."""
    num_ranks = made.num_active * made.ranks_per_node
    make_room(num_nodes, num_ranks if request.output is not None else 0)
    if request.output is None:
        return None
    files = OutputFiles(request.output, os.environ)
    files.open_all(num_ranks)
    return files


def _manager(
    request: Request, made: Shape, nodes: tuple[str, ...], job_dir: Path, host: str, job_id: int | None,
    files: OutputFiles | None,
) -> Manager:  # fmt: skip
    try:
        return Manager(request, made, nodes, job_dir, host, job_id, files)
    except OSError as err:
        raise RequestError(f"cannot use the job directory {job_dir}: {err.strerror} ({err.filename})") from err


def _job_dir(request: Request, name: str) -> Path:
    """The job's directory, on a filesystem that all nodes share; a former local one is replaced by a new number."""
    wanted = request.job_dir or (Path(request.config.job_dir) if request.config.job_dir else None)
    path = (wanted or Path.cwd() / f"flashrec-{name}").resolve()
    number = 1
    while wanted is None and (path / "journal.jsonl").exists():
        number += 1
        path = Path.cwd() / f"flashrec-{name}.{number}"
    if (path / "journal.jsonl").exists():
        raise RequestError(f"{path} holds the journal of another run: choose another --job-dir")
    make_job_dir(path, is_asked_for=wanted is not None)
    return path


def make_job_dir(path: Path, *, is_asked_for: bool) -> None:
    """Raises RequestError.

    Its name can be guessed, and whoever may write to it could lead us to other files. So one that we make is writable
    by us alone, whatever the umask, and one that somebody else has made is only used if it was asked for."""
    try:
        try:
            path.mkdir(mode=0o755, parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise
            if not is_asked_for and path.stat().st_uid != os.geteuid():
                raise RequestError(f"{path} was made by another user: choose another one with --job-dir") from None
    except OSError as err:
        raise RequestError(f"cannot make the job directory {path}: {err.strerror}") from err
