"""Is the SPANK plugin there, is it the right one, and does srun take its option? Nothing is loaded into us."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from flashrec.admin.doctor.elf import NotAPlugin, PluginFile, read_plugin
from flashrec.admin.doctor.facts import Facts, Missing, show_version
from flashrec.admin.doctor.finding import Finding, fail, ok, unknown, warn
from flashrec.admin.doctor.plugstack import OURS, PluginLine, our_lines, plugin_file, read_stack
from flashrec.config.spec import PLUGIN_CONTRACT

INSTALL = "docs/admin/install.md"
OPTION = "--flashrecovery"
# Words that a part of the suite reads behind the plugin in plugstack.conf.
_WORDS = """
flashrec no_kill
pool feature size substitutes max_per_job max_per_user max_per_partition
delay extend drain max_drain
"""
KNOWN_ARGUMENTS = frozenset(_WORDS.split())


def check_plugin(facts: Facts) -> list[Finding]:
    """The line in plugstack.conf, the file, and whether srun has loaded it."""
    if isinstance(facts.config, Missing):
        return [unknown("plugin.line", facts.config.why)]
    lines, found = find_line(facts.config)
    if lines:
        found += [*arguments(lines[-1]), file(lines[-1], facts), executable(lines[-1])]
    return [*found, loaded(facts, bool(lines))]


def find_line(config: Mapping[str, str]) -> tuple[list[PluginLine], list[Finding]]:
    """Our lines of plugstack.conf, and what there is to say about them."""
    name, path = "plugin.line", plugstack_path(config)
    if path is None:
        return [], [unknown(name, "this Slurm does not show where its plugstack.conf is")]
    try:
        ours = our_lines(read_stack(path))
    except FileNotFoundError:
        ours = []
    except OSError as error:
        return [], [unknown(name, f"{path} cannot be read: {error.strerror}", "run this as root")]
    if not ours:
        return [], [
            fail(
                name,
                f"{path}, with what it includes, does not load {OURS}: srun, sbatch and salloc have no {OPTION}",
                f"put a line 'optional {OURS}' into plugstack.conf.d on every node: {INSTALL}",
            )
        ]
    if len(ours) > 1:
        return ours, [
            fail(
                name,
                f"{OURS} is loaded {len(ours)} times: {', '.join(str(line.source) for line in ours)}",
                "keep one of these lines",
            )
        ]
    if ours[0].is_required:
        return ours, [
            warn(
                name,
                f"{ours[0].source} says required: if the plugin cannot be loaded, no srun of anybody works",
                "write optional: then only the option is missing",
            )
        ]
    return ours, [ok(name, f"{ours[0].source}: optional {ours[0].path}")]


def plugstack_path(config: Mapping[str, str]) -> Path | None:
    """PlugStackConfig as Slurm shows it; else beside slurm.conf, where Slurm looks as well."""
    shown = config.get("PlugStackConfig", "").strip()
    if shown and shown != "(null)":
        return Path(shown)
    main = config.get("SLURM_CONF", "").strip()
    return Path(main).parent / "plugstack.conf" if main else None


def arguments(line: PluginLine) -> list[Finding]:
    wrong = [word for word in line.arguments if word.partition("=")[0] not in KNOWN_ARGUMENTS or "=" not in word]
    if wrong:
        return [
            warn(
                "plugin.arguments",
                f"{line.source}: {' '.join(wrong)} means nothing to any part of flashrec, so it is ignored",
                f"correct it; the arguments are listed in {INSTALL}",
            )
        ]
    return []


def file(line: PluginLine, facts: Facts) -> Finding:
    """The file that Slurm would load on this node, and the Slurm it was built for."""
    name = "plugin.file"
    assert not isinstance(facts.config, Missing)
    path = plugin_file(line, facts.config.get("PluginDir", ""))
    if path is None:
        return fail(
            name,
            f"{line.path} is in none of the folders of PluginDir ({facts.config.get('PluginDir', 'unknown')})",
            "install the package slurm-flashrecovery here, or: make -C slurm_plugin install",
        )
    try:
        return judge_file(path, read_plugin(path), facts)
    except PermissionError:
        return unknown(name, f"{path} cannot be read by this user", f"run this as root, or: chmod 644 {path}")
    except (OSError, NotAPlugin) as error:
        return fail(name, str(error), "build and install it again: make -C slurm_plugin install")


def judge_file(path: Path, plugin: PluginFile, facts: Facts) -> Finding:
    name, built = "plugin.file", show_version(plugin.built_for)
    if (plugin.plugin_type, plugin.name) != ("spank", "flashrecovery"):
        return fail(name, f"{path} is another plugin: {plugin.plugin_type}/{plugin.name}", "install ours again")
    if plugin.contract != PLUGIN_CONTRACT:
        return fail(
            name,
            f"{path} speaks version {plugin.contract or '(none)'} of the contract between plugin and flashrec, this "
            f"flashrec version {PLUGIN_CONTRACT}: jobs are refused",
            "install plugin and Python package from one release",
        )
    slurm = facts.client if not isinstance(facts.client, Missing) else facts.slurm
    if isinstance(slurm, Missing):
        return unknown(name, f"{path} was built for Slurm {built}; whether that fits is not known: {slurm.why}")
    if plugin.built_for[:2] != slurm[:2]:
        return fail(
            name,
            f"{path} was built for Slurm {built}, but this is {show_version(slurm)}: Slurm says 'Incompatible Slurm "
            "plugin' and does not load it",
            "build it again with this Slurm's headers (make -C slurm_plugin install), on every node that was upgraded",
        )
    return ok(name, f"{path}, built for Slurm {built}")


def executable(line: PluginLine) -> Finding:
    """The flashrec that srun would become; nodes are asked by `flashrec doctor --nodes`."""
    name = "plugin.flashrec"
    given = line.argument("flashrec")
    if given is None:
        found = shutil.which("flashrec")
        if found:
            return ok(name, f"{found}, the first in PATH (no flashrec= in {line.source})")
        return fail(
            name,
            "there is no flashrec in PATH, and no flashrec=/path behind the plugin in plugstack.conf",
            "install the Python package where all nodes see it and name its flashrec there",
        )
    if not given.startswith("/"):
        return fail(name, f"flashrec={given} is not an absolute path, so the plugin ignores it", "write the whole path")
    if not os.access(given, os.X_OK):
        return fail(
            name,
            f"{line.source} says flashrec={given}, and that cannot be run here: srun {OPTION} ends with exit code 1",
            "install the Python package there (a folder that all nodes see), or correct the path",
        )
    return ok(name, given)


def loaded(facts: Facts, is_wanted: bool) -> Finding:
    """Whether the srun of this node shows the option."""
    name = "plugin.loaded"
    if isinstance(facts.help_text, Missing):
        return unknown(name, facts.help_text.why)
    text, said = facts.help_text
    if OPTION in text:
        return ok(name, f"srun --help shows {OPTION}")
    complaint = next((line.strip() for line in said.splitlines() if "plug" in line.lower()), "")
    if not is_wanted:
        return fail(name, f"srun does not know {OPTION}", "see plugin.line")
    return fail(
        name,
        f"srun does not know {OPTION} although plugstack.conf names the plugin; it says: {complaint or 'nothing'}",
        "see plugin.file; 'srun -vv true' says why Slurm did not load it",
    )
