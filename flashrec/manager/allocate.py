"""`flashrec run` outside an allocation: make one with salloc, and go on inside it.

salloc is executed in our place, with the options that concern the allocation and with room for the spares; its command
is `flashrec run` again, with everything else. So salloc shows how the job waits, its exit code is ours, and what ends
salloc or the allocation ends the job (--kill-command: else salloc would wait for us). The manager then runs where the
user typed the command and survives the loss of any node.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashrec.config.schema import Config
from flashrec.manager.request import RequestError, default_spares
from flashrec.manager.srun_options import NodeCount, SrunOptions
from flashrec.manager.steps import HANDED_OVER
from flashrec.manager.voice import say

# What srun takes from the environment and salloc knows under another name.
_INPUT = (
    "ACCOUNT", "ACCTG_FREQ", "BURST_BUFFER", "CONSTRAINT", "CORE_SPEC", "CPUS_PER_GPU", "DELAY_BOOT", "EXCLUSIVE",
    "GPU_BIND", "GPU_FREQ", "GPUS_PER_NODE", "GPUS_PER_TASK", "GRES", "GRES_FLAGS", "IMMEDIATE", "MEM_PER_CPU",
    "MEM_PER_GPU", "MEM_PER_NODE", "NETWORK", "OVERCOMMIT", "PARTITION", "POWER", "PROFILE", "QOS", "REQ_SWITCH",
    "RESERVATION", "SIGNAL", "SPREAD_JOB", "THREAD_SPEC", "THREADS_PER_CORE", "TIMELIMIT", "USE_MIN_NODES",
    "WAIT4SWITCH", "WCKEY",
)  # fmt: skip


def is_needed(environ: Mapping[str, str]) -> bool:
    """True outside of any allocation."""
    return not environ.get("SLURM_JOB_ID")


def salloc_argv(asked: SrunOptions, config: Config, ours: Sequence[str], command: Sequence[str]) -> list[str]:
    """The whole command line. ours: flashrec's own options as typed. Raises RequestError for an unknown shape."""
    nodes, per_node, spares = _active_nodes(asked), _ranks_per_node(asked), default_spares(config)
    name = [] if any(word.startswith("--job-name=") for word in asked.allocation) else [f"--job-name={_name(command)}"]
    return [
        "salloc", "--no-kill", "--kill-command=TERM", f"--nodes={_range(nodes, spares)}",
        f"--ntasks-per-node={per_node}", *name, *asked.allocation,
        sys.executable, "-m", "flashrec.cli.main", "run", *ours, f"--spares={spares}", f"--nodes={_range(nodes, 0)}",
        f"--ntasks-per-node={per_node}", *asked.steps, *_output(asked), "--", *command,
    ]  # fmt: skip


def become_salloc(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Never returns. Raises RequestError if there is no salloc."""
    if shutil.which(argv[0], path=environ.get("PATH")) is None:
        raise RequestError(
            "not inside a Slurm allocation, and there is no salloc to make one: install Slurm's client commands or "
            "load their module"
        )
    before = argv.index(sys.executable)
    say(f"no allocation yet, asking Slurm for one: {shlex.join(argv[:before])}")
    sys.stdout.flush()
    try:
        os.execvpe(argv[0], list(argv), environment(environ))
    except OSError as err:
        raise RequestError(f"cannot run {argv[0]}: {err.strerror}") from err


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For salloc: as it is, with the input variables of srun under salloc's names, and our marks."""
    renamed = {
        f"SALLOC_{name}": environ[f"SLURM_{name}"]
        for name in _INPUT
        if f"SLURM_{name}" in environ and f"SALLOC_{name}" not in environ
    }
    return {**environ, **renamed, **HANDED_OVER, "FLASHREC_NO_KILL": "1"}


def _active_nodes(asked: SrunOptions) -> NodeCount:
    """-N; without it as many as -n ranks fill."""
    ranks, per_node = asked.num_ranks, asked.ranks_per_node
    if asked.nodes is None:
        if ranks is None or per_node is None:
            raise RequestError(
                "outside an allocation say how many nodes have ranks: -N (and -n or --ntasks-per-node for more than "
                "one rank each)"
            )
        if ranks % per_node:
            raise RequestError(
                f"{ranks} ranks with {per_node} on each node do not fill the last one: every node gets the same number"
            )
        return NodeCount(ranks // per_node, ranks // per_node)
    if ranks is not None and asked.nodes.least != asked.nodes.most:
        raise RequestError("outside an allocation -n goes with one number of nodes: say -N NODES, not a range")
    return asked.nodes


def _ranks_per_node(asked: SrunOptions) -> int:
    nodes, ranks, per_node = asked.nodes, asked.num_ranks, asked.ranks_per_node
    if ranks is None or nodes is None:
        return per_node or 1
    if ranks % nodes.most or (per_node and per_node * nodes.most != ranks):
        raise RequestError(
            f"{ranks} ranks do not fit {nodes.most} nodes"
            + (f" with {per_node} each" if per_node else " evenly")
            + ": every node gets the same number of ranks"
        )
    return ranks // nodes.most


def _range(nodes: NodeCount, spares: int) -> str:
    least, most = nodes.least + spares, nodes.most + spares
    return str(least) if least == most else f"{least}-{most}"


def _name(command: Sequence[str]) -> str:
    """As srun names a job after its command."""
    return Path(command[0]).name if command else "flashrec"


def _output(asked: SrunOptions) -> list[str]:
    said = {"--output": asked.output, "--open-mode": asked.open_mode}
    return [*(f"{name}={value}" for name, value in said.items() if value is not None), *["--label"] * asked.is_labelled]
