"""Health checks of a node: small programs that print one verdict each, run side by side and bounded in time.

    plan = load_plan(path)                      # the site's check file, or the built-in one
    report = await run_checks(plan, node="n1")  # never raises because of a check, never hangs with one

No torch, no Slurm, no decision: what follows from a report (a spare is not admitted, a node is drained) is decided by
whoever asked. docs/admin/node-health.md describes the file and the checks.
"""

from flashrec.health.checkfile import CheckFileError, CheckLine, Plan, Settings, load_plan
from flashrec.health.runner import Finding, Report, run_checks
from flashrec.health.verdict import Status, Verdict

__all__ = [
    "CheckFileError",
    "CheckLine",
    "Finding",
    "Plan",
    "Report",
    "Settings",
    "Status",
    "Verdict",
    "load_plan",
    "run_checks",
]
