"""`flashrec run`: the manager of a job. Started in an allocation, or outside (it then makes one), or on a laptop with
--local; by the user, or by `srun --flashrecovery` in its own place (docs/reference/plugin-contract.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from flashrec.config.load import ConfigError, load_config
from flashrec.config.schema import Config
from flashrec.config.spec import PLUGIN_CONTRACT, Spec, parse_spec
from flashrec.manager import allocate
from flashrec.manager.app import EXIT_USAGE
from flashrec.manager.entry import run
from flashrec.manager.output_files import output_file
from flashrec.manager.request import Request, RequestError
from flashrec.manager.srun_options import SrunOptions, read_srun_options, split
from flashrec.manager.voice import say


class CommandAfterDashes(click.Command):
    """Everything after the first `--` is the user's command and none of our business. In front of it are our options
    and srun's: click parses only ours (to it the -h in srun's -Jhello would be a cry for help)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["flashrec.command"] = tuple(args[at + 1 :])
        ours, srun = self._divide(ctx, args[:at])
        ctx.meta["flashrec.ours"] = tuple(ours)
        return super().parse_args(ctx, [*ours, "--", *srun])

    def _divide(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        options = {name: param for param in self.get_params(ctx) for name in param.opts if name.startswith("-")}
        ours: list[str] = []
        srun: list[str] = []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            option = options.get(word.partition("=")[0])
            if isinstance(option, click.Option):
                ours.append(word)
                if not option.is_flag and "=" not in word and option.name != "flashrecovery" and rest:
                    ours.append(rest.pop(0))
            else:
                srun.append(word)
                if rest and _wants_value(word):
                    srun.append(rest.pop(0))
        return ours, srun


def _wants_value(word: str) -> bool:
    """True for an option of srun whose value is the next word."""
    try:
        split([word])
    except RequestError as err:
        return str(err).endswith("needs a value")
    return False


@click.command(
    "run",
    cls=CommandAfterDashes,
    options_metavar="[OPTIONS]",
    epilog="""\b
Examples:
  flashrec run --spares 1 --ntasks-per-node=8 -- python train.py        (in a batch script with --no-kill)
  flashrec run --spares 2 --gpus-per-task=1 -c 12 -- python train.py
  flashrec run -N4 --spares 1 -p gpu -t 60 -- python train.py           (on a login node: asks for 5 nodes first)
  flashrec run --local --nodes 3 --ntasks-per-node 2 -- python train.py (no Slurm, no root: try it on a laptop)
\b
Where the plugin is installed the same is said at srun:
  srun -N4 --flashrecovery=spares=1 -p gpu -t 60 python train.py
\b
SPEC is "off" or a comma-separated list of:
  spares=COUNT    nodes that are kept without ranks (--spares)
  tier=hot|warm   spares of this job, with processes that have torch imported, or without
  tier=pool       when no spare is left, a node from the pool
  pool=NAME       the reservation that holds the pool (--pool)
  max-swaps=COUNT how many nodes may be taken from the pool
  config=FILE     YAML file (--config)
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
@click.option(
    "--flashrecovery",
    is_flag=False,
    flag_value="",
    metavar="[=SPEC]",
    help="As at srun, see below; --set, --spares and --pool win over it.  [default: $FLASHREC_SPEC, under the plugin]",
)
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
    flashrecovery: str | None,
    config_file: Path | None,
    settings: tuple[str, ...],
    job_dir: Path | None,
    local: bool,
    srun_options: tuple[str, ...],
) -> None:
    """Run a training script so that it survives the loss of a process or a node.

    Start it inside an allocation made with --no-kill that has spare nodes; outside of any, -N (nodes with ranks) makes
    one through salloc, spares added. Options of srun before the -- go to whom they concern: --ntasks-per-node,
    --gpus-per-task, -c, ... to the workers' job steps; -p, -A, -t, ... to the allocation, if one is made. With -o FILE
    (%j, %t, ... as in srun) the ranks' output goes there.
    """
    command: tuple[str, ...] = ctx.meta["flashrec.command"]
    try:
        if not command:
            raise RequestError("no command: flashrec run [options] -- python train.py …")
        spec = _spec(flashrecovery, os.environ)
        config = _config(spec, config_file, settings, spares, pool)
        makes_allocation = not local and allocate.is_needed(os.environ)
        asked = read_srun_options(srun_options, makes_allocation=makes_allocation)
        for notice in asked.notices:
            say(notice)
        if makes_allocation and (asked.nodes or asked.num_ranks):
            output_file(asked.output, asked.open_mode, is_labelled=asked.is_labelled)
            allocate.become_salloc(allocate.salloc_argv(asked, config, ctx.meta["flashrec.ours"], command), os.environ)
        code = run(_request(command, asked, config, job_dir, local))
    except (ConfigError, RequestError) as err:
        click.echo(f"flashrec run: {err}", err=True)
        code = EXIT_USAGE
    ctx.exit(code)


def _spec(typed: str | None, environ: Mapping[str, str]) -> Spec:
    """The option; else what the plugin exported from the submit command's."""
    plugin = environ.get("FLASHREC_PLUGIN")
    if plugin is not None and plugin != PLUGIN_CONTRACT:
        raise RequestError(
            f"the Slurm plugin speaks version {plugin} of the contract, this flashrec version {PLUGIN_CONTRACT}: "
            "install the two from one release (or run with FLASHREC_PLUGIN unset)"
        )
    if typed is None:
        spec = parse_spec(environ.get("FLASHREC_SPEC", "")) if plugin is not None else Spec()
        return Spec() if spec.is_off else spec  # who types flashrec run wants it
    spec = parse_spec(typed)
    if spec.is_off:
        raise RequestError("--flashrecovery=off means an ordinary srun: start the command with srun")
    return spec


def _config(
    spec: Spec, config_file: Path | None, settings: tuple[str, ...], spares: int | None, pool: str | None
) -> Config:
    if config_file is not None and spec.config is not None:
        raise RequestError("a config file is given twice, by --config and in --flashrecovery: leave out one")
    if pool is not None:
        settings = (*settings, f"pool.name={json.dumps(pool)}")
    config = load_config(config_file or (Path(spec.config) if spec.config else None), settings, spec.settings())
    return config if spares is None else msgspec.structs.replace(config, spares=spares)


def _request(
    command: tuple[str, ...], asked: SrunOptions, config: Config, job_dir: Path | None, local: bool
) -> Request:
    file, follow = output_file(asked.output, asked.open_mode, is_labelled=asked.is_labelled)
    if follow is not None:
        config = msgspec.structs.replace(config, output=msgspec.structs.replace(config.output, follow=follow))
    nodes = None if local else asked.nodes
    return Request(
        command=command,
        srun_options=asked.steps,
        num_ranks=asked.num_ranks,
        num_nodes=nodes.most if nodes else None,
        ranks_per_node=asked.ranks_per_node,
        config=config,
        local_nodes=_local_nodes(asked) if local else 0,
        job_dir=job_dir,
        least_nodes=nodes.least if nodes else None,
        output=file,
    )


def _local_nodes(asked: SrunOptions) -> int:
    if asked.steps or asked.allocation:
        other = (*asked.steps, *asked.allocation)[0]
        raise RequestError(
            f"with --local only --nodes, --ntasks, --ntasks-per-node and --output make sense, not {other}"
        )
    return asked.nodes.most if asked.nodes else 3
