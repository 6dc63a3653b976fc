"""Files that root acts upon: the health program's check file, and what the hooks write down about jobs. Whoever may
write to them decides what root does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flashrec.admin.doctor.finding import Finding, fail, ok, unknown
from flashrec.health.catalog import doubt_about
from flashrec.health.checkfile import DEFAULT_PATH, CheckFileError, load_plan

SPOOL = Path("/var/spool/flashrec")  # slurm_plugin/hooks/flashrec_root.py


def check_root_files(config: Mapping[str, str], check_file: Path = DEFAULT_PATH, spool: Path = SPOOL) -> list[Finding]:
    """config: slurm.conf as shown; {} if it is not known. Looks only at what is in use."""
    found = []
    if "flashrec" in config.get("HealthCheckProgram", "") and check_file.exists():
        found.append(health_checks(check_file))
    if spool.exists():
        found.append(spool_folder(spool))
    return found


def health_checks(path: Path) -> Finding:
    name = "health.check-file"
    if not os.access(path, os.R_OK):
        return unknown(name, f"{path} cannot be read by this user", "run this as root")
    try:
        plan = load_plan(path)
    except CheckFileError as error:
        return fail(name, f"{error}: no check is run, no node is drained", "correct it: flashrec node-health --list")
    doubt = doubt_about(path)
    if doubt:
        return fail(name, f"{doubt.partition(';')[0]}: the health program does not run it", doubt.rpartition("; ")[2])
    return ok(name, f"{path}, {len(plan.lines)} checks")


def spool_folder(path: Path) -> Finding:
    name, doubt = "hooks.spool", doubt_about(path)
    if doubt:
        return fail(
            name,
            f"{doubt.partition(';')[0]}: others can make root drain nodes or cancel jobs",
            doubt.rpartition("; ")[2],
        )
    return ok(name, str(path))
