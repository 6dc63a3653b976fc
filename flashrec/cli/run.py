"""`flashrec run`: the manager of a job, started in the batch script (or on a laptop with --local)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec

from flashrec.config.load import ConfigError, load_config
from flashrec.manager.entry import EXIT_USAGE, run
from flashrec.manager.request import Request, RequestError, read_srun_options


class CommandAfterDashes(click.Command):
    """Everything after the first `--` is the user's command and none of our business."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["flashrec.command"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@click.command(
    "run",
    cls=CommandAfterDashes,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS]",
    epilog="""\b
Examples:
  flashrec run --spares 1 --ntasks-per-node=8 -- python train.py        (in a batch script with --no-kill)
  flashrec run --spares 2 --gpus-per-task=1 -c 12 -- python train.py
  flashrec run --local --nodes 3 --ntasks-per-node 2 -- python train.py (no Slurm, no root: try it on a laptop)
\b
Exit codes: 0 all ranks finished; 1 the training script is at fault; 75 out of nodes or replicas (requeue);
64 wrong usage; 130/143 interrupted. See docs/reference/exit-codes.md.""",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    help="Nodes of the allocation to keep without ranks.  [default: 1; with a pool 0]",
)
@click.option("--pool", metavar="NAME", help="Take replacement nodes from this reservation when no spare is left.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file (docs/reference/config.md).")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="One setting, e.g. detection.dead_after_s=3."
)
@click.option("--job-dir", type=click.Path(path_type=Path), help="Journal and logs.  [default: ./flashrec-JOBID]")
@click.option("--local", is_flag=True, help="No Slurm: simulate the nodes with processes on this machine.")
@click.argument("srun_options", nargs=-1, type=click.UNPROCESSED, metavar="[SRUN OPTIONS] -- COMMAND...")
@click.pass_context
def run_command(
    ctx: click.Context,
    *,
    spares: int | None,
    pool: str | None,
    config_file: Path | None,
    settings: tuple[str, ...],
    job_dir: Path | None,
    local: bool,
    srun_options: tuple[str, ...],
) -> None:
    """Run a training script so that it survives the loss of a process or a node.

    Start it inside an allocation made with --no-kill that has spare nodes. Options of srun (--ntasks-per-node,
    --gpus-per-task, -c, ...) before the -- apply to the workers' job steps.
    """
    try:
        if pool is not None:
            settings = (*settings, f"pool.name={json.dumps(pool)}")
        config = load_config(config_file, settings)
        if spares is not None:
            config = msgspec.structs.replace(config, spares=spares)
        passed, counts = read_srun_options(srun_options)
        request = Request(
            command=ctx.meta["flashrec.command"],
            srun_options=passed,
            num_ranks=counts.get("ntasks"),
            num_nodes=None if local else counts.get("nodes"),
            ranks_per_node=counts.get("per_node"),
            config=config,
            local_nodes=_local_nodes(local, passed, counts),
            job_dir=job_dir,
        )
        code = run(request)
    except (ConfigError, RequestError) as err:
        click.echo(f"flashrec run: {err}", err=True)
        code = EXIT_USAGE
    ctx.exit(code)


def _local_nodes(local: bool, passed: tuple[str, ...], counts: dict[str, Any]) -> int:
    if not local:
        return 0
    if passed:
        raise RequestError(f"with --local only --nodes, --ntasks and --ntasks-per-node make sense, not {passed[0]}")
    nodes = counts.get("nodes", 3)
    if nodes < 1:
        raise RequestError("--nodes must be 1 or more")
    return int(nodes)
