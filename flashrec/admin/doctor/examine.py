"""All checks in order. A group that breaks is a finding of its own; the other groups are still looked at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

import flashrec
from flashrec.admin.doctor import machine, versions
from flashrec.admin.doctor.facts import Facts, Missing, gather
from flashrec.admin.doctor.finding import Finding, fail, ok, unknown
from flashrec.admin.doctor.glue import check_glue, missing_hooks
from flashrec.admin.doctor.plugin_checks import check_plugin, find_line
from flashrec.admin.doctor.plugstack import PluginLine
from flashrec.admin.doctor.pools import check_pool, wanted_pool
from flashrec.admin.doctor.root_files import check_root_files
from flashrec.admin.doctor.slurm_checks import check_slurm
from flashrec.admin.pool_sync import PoolError
from flashrec.slurm.command import Commands
from flashrec.slurm.scheduler import Scheduler


class NodeReport(msgspec.Struct, frozen=True):
    """What a node says of itself. clock: seconds since the epoch there. sees_proof: None if it was not asked."""

    node: str
    clock: float
    version: str
    sees_proof: bool | None
    findings: tuple[Finding, ...]


async def examine(
    scheduler: Scheduler, commands: Commands, environ: Mapping[str, str], port: int = 0
) -> tuple[list[Finding], Facts]:
    """The cluster, and the machine we are on. Asks Slurm, changes nothing, starts no job. port: control.port."""
    facts = await gather(scheduler, commands)
    line = our_line(facts)
    try:
        pool, wrong = wanted_pool(line, facts), []
    except PoolError as error:
        pool, wrong = None, [fail("pool.arguments", str(error), "correct it: `flashrec pool` refuses to work with it")]
    found = [
        *_guarded("slurm", lambda: check_slurm(facts)),
        *_guarded("plugin", lambda: check_plugin(facts)),
        *_guarded("lua", lambda: check_glue(facts, line, pool is not None)),
        *(wrong or _guarded("pool", lambda: check_pool(pool, facts))),
        *await _this_machine(facts, commands, environ, port),
        *_guarded("versions", lambda: check_versions(facts)),
    ]
    return found, facts


async def examine_node(scheduler: Scheduler, commands: Commands, environ: Mapping[str, str], proof: str) -> NodeReport:
    """The part for a node: run there by `flashrec doctor --nodes`. proof: a file that the caller has made."""
    facts = await gather(scheduler, commands)
    found = [
        *_guarded("plugin", lambda: check_plugin(facts)),
        *_guarded("hooks", lambda: missing_hooks({} if isinstance(facts.config, Missing) else facts.config)),
        *await _this_machine(facts, commands, environ, 0),
        *_guarded("versions", lambda: check_versions(facts)),
    ]
    node = environ.get("SLURMD_NODENAME", "")
    sees = Path(proof).exists() if proof else None
    named = tuple(msgspec.structs.replace(finding, node=node) for finding in found)
    return NodeReport(node, time.time(), flashrec.__version__, sees, named)


def our_line(facts: Facts) -> PluginLine | None:
    if isinstance(facts.config, Missing):
        return None
    lines, _ = find_line(facts.config)
    return lines[-1] if lines else None


def check_versions(facts: Facts) -> list[Finding]:
    slurm = facts.slurm
    return versions.check_versions(None if isinstance(slurm, Missing) else slurm)


async def _this_machine(facts: Facts, commands: Commands, environ: Mapping[str, str], port: int) -> list[Finding]:
    config: Mapping[str, str] = {} if isinstance(facts.config, Missing) else facts.config
    nodes = 0 if isinstance(facts.nodes, Missing) else len(facts.nodes)
    try:
        found = await machine.check_machine(
            commands, environ, auth_info=config.get("AuthInfo", ""), num_nodes=nodes, port=port
        )
        mounts = Path("/proc/self/mounts").read_text(errors="replace")
        return [*found, machine.file_system(Path(os.getcwd()), mounts), *check_root_files(config)]
    except Exception as error:
        return [_broken("machine", error)]


def _guarded(group: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:
        return [_broken(group, error)]


def _broken(group: str, error: Exception) -> Finding:
    return unknown(group, f"the checks themselves failed: {type(error).__name__}: {error}", "please report this")


def only_here() -> Finding:
    """Said when no nodes were asked, so that nobody takes silence for health."""
    return ok("nodes", "not asked; 'flashrec doctor --nodes n1,n2' starts a short job that looks at nodes as well")
