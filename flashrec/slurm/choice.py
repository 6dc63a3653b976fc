"""Which Scheduler to use: Slurm's own commands, unless FLASHREC_SLURM asks for pyslurm.

cli      Slurm's commands (the default: right with every release, and fast enough)
pyslurm  pyslurm in a helper process; Slurm's commands take over, and say so once, where that fails
"""

from __future__ import annotations

from collections.abc import Mapping

from flashrec.slurm.cli import CliScheduler
from flashrec.slurm.command import CALL_TIMEOUT_S, Commands
from flashrec.slurm.pyslurm_client import PyslurmScheduler
from flashrec.slurm.scheduler import Scheduler

CHOICES = ("cli", "pyslurm")


def make_scheduler(environ: Mapping[str, str], timeout_s: float = CALL_TIMEOUT_S) -> Scheduler:
    """The site's choice. ValueError if it is none."""
    asked = environ.get("FLASHREC_SLURM") or "cli"
    if asked not in CHOICES:
        raise ValueError(f"FLASHREC_SLURM={asked}: use {' or '.join(CHOICES)}")
    return PyslurmScheduler(timeout_s) if asked == "pyslurm" else CliScheduler(Commands(timeout_s))
