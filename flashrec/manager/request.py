"""What the user asked for: the command, its options, the shape of the job. srun's options: `srun_options`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from flashrec.config.schema import Config


class RequestError(Exception):
    """The command line cannot be carried out; the message says what to change."""


class OutputFile(msgspec.Struct, frozen=True):
    """Where the followed output goes instead of the job's output. pattern: srun's -o; see `output_files`."""

    pattern: str
    is_appended: bool = False
    is_labelled: bool = False


class Request(msgspec.Struct, frozen=True):
    """local_nodes 0: use the Slurm allocation; otherwise that many simulated nodes on this machine, without Slurm.

    num_nodes: nodes with ranks; least_nodes: so many will do if the allocation has no more (None: num_nodes)."""

    command: tuple[str, ...]
    srun_options: tuple[str, ...]
    num_ranks: int | None
    num_nodes: int | None
    ranks_per_node: int | None
    config: Config
    local_nodes: int = 0
    job_dir: Path | None = None
    least_nodes: int | None = None
    output: OutputFile | None = None


class Shape(msgspec.Struct, frozen=True):
    """How many nodes get ranks, and how many ranks each."""

    num_active: int
    ranks_per_node: int
    num_spares: int


def shape(request: Request, num_nodes: int, environ: Mapping[str, str]) -> Shape:
    """Active nodes, ranks per node and spares in an allocation of `num_nodes`. Raises RequestError with the remedy."""
    active = _num_active(request, num_nodes)
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


def default_spares(config: Config) -> int:
    """Nodes without ranks, if -N does not say how many have ranks."""
    if config.spares is not None:
        return config.spares
    return 0 if config.pool.reservation else 1


def _num_active(request: Request, num_nodes: int) -> int:
    spares, wanted = request.config.spares, request.num_nodes
    if wanted is None:
        spares = default_spares(request.config)
        if num_nodes - spares < 1:
            raise RequestError(
                f"{num_nodes} nodes with {spares} spares leave {max(num_nodes - spares, 0)} for ranks: ask for more "
                f"nodes (sbatch --nodes={spares + 1} or more) or fewer --spares"
            )
        return num_nodes - spares
    least = request.least_nodes or wanted
    if least > num_nodes:
        raise RequestError(f"{least} active nodes, but the allocation has {num_nodes}")
    if spares is not None and least + spares > num_nodes:
        raise RequestError(
            f"{least} active nodes and {spares} spares need {least + spares} nodes, but the allocation has {num_nodes}"
        )
    return wanted if least == wanted else min(wanted, max(least, num_nodes - default_spares(request.config)))


def _number(name: str, value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,6}", value):
        raise RequestError(f"srun option {name}: {value!r} is not a count of 1 or more")
    return int(value)


def _from_environment(environ: Mapping[str, str]) -> int | None:
    value = environ.get("SLURM_NTASKS_PER_NODE")
    return _number("SLURM_NTASKS_PER_NODE", value.split("(")[0]) if value else None
