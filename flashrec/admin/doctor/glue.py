"""The Lua filters and the hooks: are they called, by the one file of each kind that a cluster has?"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from pathlib import Path

from flashrec.admin.doctor.facts import Facts, Missing
from flashrec.admin.doctor.finding import Finding, fail, ok, unknown, warn
from flashrec.admin.doctor.plugstack import PluginLine

INSTALL = "docs/admin/install.md"
_MAX_FILE_BYTES = 1024 * 1024


def check_glue(facts: Facts, line: PluginLine | None, has_pool: bool) -> list[Finding]:
    """has_pool: without one, job_submit and the epilog have nothing to do."""
    if isinstance(facts.config, Missing):
        return [unknown("lua.cli_filter", facts.config.why)]
    found = [cli_filter(facts.config, line is not None and line.argument("no_kill") == "cli_filter")]
    if has_pool:
        found += [job_submit(facts.config), *hooks(facts.config, line)]
    return found


def cli_filter(config: Mapping[str, str], is_relied_on: bool) -> Finding:
    """is_relied_on: plugstack.conf tells the plugin, and so `flashrec run`, that the filter sets --no-kill."""
    name, lost = "lua.cli_filter", "users must give --no-kill and count the spares in --nodes themselves"
    if not _has_lua(config, "CliFilterPlugins"):
        if is_relied_on:
            return fail(
                name,
                "plugstack.conf says no_kill=cli_filter, but CliFilterPlugins has no cli_filter/lua: jobs without "
                "--no-kill look as if they had it, and end with their first lost node",
                "set CliFilterPlugins=cli_filter/lua, or take no_kill=cli_filter away",
            )
        return warn(
            name,
            f"CliFilterPlugins has no cli_filter/lua: with sbatch and salloc {lost}",
            f"set CliFilterPlugins=cli_filter/lua and install cli_filter.lua beside slurm.conf: {INSTALL}",
        )
    finding = _called(name, config, "cli_filter.lua", "flashrec_cli_filter", "pre_submit")
    return finding if finding is not None else ok(name, "cli_filter.lua calls ours")


def job_submit(config: Mapping[str, str]) -> Finding:
    name = "lua.job_submit"
    if not _has_lua(config, "JobSubmitPlugins"):
        return fail(
            name,
            "JobSubmitPlugins has no lua: nothing keeps ordinary jobs out of the pool, and no limit is enforced",
            f"set JobSubmitPlugins=lua and install job_submit.lua beside slurm.conf on the controller: {INSTALL}",
        )
    path = _beside(config, "job_submit.lua")
    if path is None or not path.exists():
        return unknown(
            name,
            "job_submit.lua is not here; only the controller needs it",
            "run flashrec doctor on the controller",
        )
    finding = _called(name, config, "job_submit.lua", "flashrec_job_submit", "job_submit")
    return finding if finding is not None else ok(name, "job_submit.lua calls ours")


def hooks(config: Mapping[str, str], line: PluginLine | None) -> list[Finding]:
    """The epilog gives spares back, and drains what a job found bad; the prolog writes down what both need."""
    found = [
        _hook(
            config,
            "Epilog",
            "a spare from the pool is given back only by the manager and the next pool sync, and a node that a job "
            "found bad is not drained",
        )
    ]
    asked = [word for word in (line.arguments if line else ()) if word.startswith(("drain=user", "extend=", "delay="))]
    if asked:
        found.append(_hook(config, "Prolog", f"{' '.join(asked)} in plugstack.conf has no effect"))
    return found


def _hook(config: Mapping[str, str], key: str, lost: str) -> Finding:
    """Every path that Prolog= or Epilog= names may be a script of the site's that calls ours."""
    name, programs = f"hooks.{key.lower()}", _programs(config, key)
    wanted = f"flashrec-{key.lower()}"
    there = [Path(word) for word in programs if Path(word).exists()]
    ours = [path for path in there if path.name == wanted or _mentions(path, wanted)]
    if ours:
        return ok(name, str(ours[0]))
    if len(there) < len(programs):
        return unknown(
            name,
            f"{key}={','.join(programs)} is not on this machine, so what it calls is not known",
            "run this on a node",
        )
    return warn(
        name, f"{key} does not call flashrec's: {lost}", f"add /usr/libexec/flashrec/flashrec-{key.lower()}: {INSTALL}"
    )


def missing_hooks(config: Mapping[str, str]) -> list[Finding]:
    """For a node: Slurm drains it when a program that Prolog= or Epilog= names is not there (measured)."""
    lost = [
        f"{key}={path}" for key in ("Prolog", "Epilog") for path in _programs(config, key) if not Path(path).exists()
    ]
    if lost:
        text = f"{', '.join(lost)} is not on this node: Slurm drains it at its next job"
        return [fail("hooks.missing", text, "install it here (package slurm-flashrecovery), or correct slurm.conf")]
    return []


def _programs(config: Mapping[str, str], key: str) -> list[str]:
    """Paths that Epilog= names; a pattern stands for several. Later releases show Epilog[0], Epilog[1], or nothing."""
    given = " ".join(value for shown, value in config.items() if re.fullmatch(rf"{key}(\[\d+\])?", shown))
    words = [word for word in given.replace(",", " ").split() if word not in ("(null)", "none")]
    return [path for word in words for path in sorted(glob.glob(word)) or [word]]


def _has_lua(config: Mapping[str, str], key: str) -> bool:
    words = config.get(key, "").replace(",", " ").split()
    return any(word.rpartition("/")[2] == "lua" for word in words)


def _beside(config: Mapping[str, str], name: str) -> Path | None:
    main = config.get("SLURM_CONF", "").strip()
    return Path(main).parent / name if main else None


def _called(name: str, config: Mapping[str, str], file_name: str, module: str, function: str) -> Finding | None:
    """What is wrong with the site's script; None if it names our module and calls it."""
    path = _beside(config, file_name)
    if path is None:
        return unknown(name, "Slurm does not show where its configuration is")
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return fail(
            name,
            f"{path} is missing on this node: Slurm refuses every job that is submitted here",
            f"install {file_name} there: {INSTALL}",
        )
    except OSError as error:
        return unknown(name, f"{path} cannot be read: {error.strerror}", "run this as root")
    code = "\n".join(line.partition("--")[0] for line in text.splitlines())
    if module not in code or f".{function}(" not in code:
        return fail(
            name,
            f"{path} does not call {module}: the filter does nothing for FlashRecovery",
            f"add the lines marked FlashRecovery of {file_name}.example to it",
        )
    return None


def _mentions(path: Path, word: str) -> bool:
    try:
        return path.stat().st_size <= _MAX_FILE_BYTES and word in path.read_text(errors="replace")
    except OSError:
        return False
