"""What the user asked for: the command, srun's own options for the workers' job step, the shape of the job.

srun's options are passed on as they are; only those that decide how many ranks run where are read, and those that
flashrec must decide itself are refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from flashrec.config.schema import Config

_COUNT = {"-n": "ntasks", "--ntasks": "ntasks", "-N": "nodes", "--nodes": "nodes", "--ntasks-per-node": "per_node"}
_REFUSED = {
    "-w": "flashrec places the ranks itself", "--nodelist": "flashrec places the ranks itself",
    "-F": "flashrec places the ranks itself", "--nodefile": "flashrec places the ranks itself",
    "-x": "exclude nodes in sbatch", "--exclude": "exclude nodes in sbatch",
    "-r": "flashrec places the ranks itself", "--relative": "flashrec places the ranks itself",
    "-o": "workers write to JOBDIR/logs/rank-R.I.log", "--output": "workers write to JOBDIR/logs/rank-R.I.log",
    "-e": "workers write to JOBDIR/logs/rank-R.I.log", "--error": "workers write to JOBDIR/logs/rank-R.I.log",
    "-K": "a lost rank must not end the others", "--kill-on-bad-exit": "a lost rank must not end the others",
    "-W": "a lost rank must not end the others", "--wait": "a lost rank must not end the others",
    "-i": "ranks have no standard input", "--input": "ranks have no standard input",
    "--jobid": "run inside the allocation", "--multi-prog": "one command for all ranks",
    "--pty": "ranks have no terminal",
}  # fmt: skip
_KILLING = {"-k": "", "--no-kill": ""}


class RequestError(Exception):
    """The command line cannot be carried out; the message says what to change."""


class Request(msgspec.Struct, frozen=True):
    """local_nodes 0: use the Slurm allocation; otherwise that many simulated nodes on this machine, without Slurm."""

    command: tuple[str, ...]
    srun_options: tuple[str, ...]
    num_ranks: int | None
    num_nodes: int | None
    ranks_per_node: int | None
    config: Config
    local_nodes: int = 0
    job_dir: Path | None = None


class Shape(msgspec.Struct, frozen=True):
    """How many nodes get ranks, and how many ranks each."""

    num_active: int
    ranks_per_node: int
    num_spares: int


def read_srun_options(options: Sequence[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Split srun's options into those passed on and the counts among them. Raises RequestError."""
    passed: list[str] = []
    counts: dict[str, int] = {}
    index = 0
    while index < len(options):
        option = options[index]
        name, value = _split(option)
        index += 1
        if name in _REFUSED:
            raise RequestError(f"srun option {name} cannot be used with flashrec: {_REFUSED[name]}")
        if name in _KILLING:
            continue  # always given
        meant = [known for known in (*_COUNT, *_REFUSED) if name.startswith("--") and known.startswith(name)]
        if meant and name not in _COUNT:  # srun takes abbreviations, so what we must see could pass unseen
            raise RequestError(f"srun option {name} cannot be used with flashrec: write {' or '.join(meant)} in full")
        if name not in _COUNT:
            passed.append(option)
            continue
        if value is None:
            if index == len(options):
                raise RequestError(f"srun option {name} needs a number")
            value = options[index]
            index += 1
        counts[_COUNT[name]] = _number(name, value)
    return tuple(passed), counts


def shape(request: Request, num_nodes: int, environ: Mapping[str, str]) -> Shape:
    """Active nodes, ranks per node and spares in an allocation of `num_nodes`. Raises RequestError with the remedy."""
    spares = request.config.spares
    if request.num_nodes is not None:
        if spares is not None and request.num_nodes + spares > num_nodes:
            raise RequestError(
                f"{request.num_nodes} active nodes and {spares} spares need {request.num_nodes + spares} nodes, "
                f"but the allocation has {num_nodes}"
            )
        if request.num_nodes > num_nodes:
            raise RequestError(f"{request.num_nodes} active nodes, but the allocation has {num_nodes}")
        active = request.num_nodes
    else:
        if spares is None:
            spares = 0 if request.config.pool.reservation else 1
        active = num_nodes - spares
        if active < 1:
            raise RequestError(
                f"{num_nodes} nodes with {spares} spares leave {max(active, 0)} for ranks: ask for more nodes "
                f"(sbatch --nodes={spares + 1} or more) or fewer --spares"
            )
    per_node = request.ranks_per_node or _from_environment(environ)
    if request.num_ranks is not None:
        if request.num_ranks % active or (per_node and per_node * active != request.num_ranks):
            raise RequestError(
                f"{request.num_ranks} ranks do not fit {active} active nodes"
                + (f" with {per_node} each" if per_node else " evenly")
                + ": every node gets the same number of ranks"
            )
        per_node = request.num_ranks // active
    return Shape(active, per_node or 1, num_nodes - active)


def _split(option: str) -> tuple[str, str | None]:
    if option.startswith("--"):
        name, equals, value = option.partition("=")
        return name, value if equals else None
    if re.match(r"-[A-Za-z].", option):
        return option[:2], option[2:].removeprefix("=")
    return option, None


def _number(name: str, value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,6}", value):
        raise RequestError(f"srun option {name}: {value!r} is not a count of 1 or more")
    return int(value)


def _from_environment(environ: Mapping[str, str]) -> int | None:
    value = environ.get("SLURM_NTASKS_PER_NODE")
    return _number("SLURM_NTASKS_PER_NODE", value.split("(")[0]) if value else None
