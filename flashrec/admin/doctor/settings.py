"""slurm.conf as the controller runs with it: what a recovery, a pool or the health program needs of each setting.

Pure functions of the configuration (`scontrol show config`: 'SlurmdTimeout' -> '300 sec'). Where a number comes from is
said beside it; the facts are in docs/guides/devcluster.md and docs/admin/install.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from flashrec.admin.doctor.finding import Finding, fail, ok, unknown, warn

LONG_JOB_S = 3600.0  # a job older than BatchStartTimeout dies with the reboot of its batch host
REBOOT_S = 120.0  # few nodes reboot faster
LONG_MESSAGE_S = 60.0
RARE_HEALTH_CHECK_S = 900.0
UNKILLABLE_FACTOR = 5  # Slurm's own advice: UnkillableStepTimeout at least five times MessageTimeout
EXTERN_KEPT = (23, 2, 6)  # from here on a lost node does not end the extern steps of the others


class Settings:
    """slurm.conf with its values taken apart. A key that this Slurm does not show raises KeyError with its name."""

    def __init__(self, shown: Mapping[str, str]) -> None:
        self._shown = shown

    def text(self, key: str) -> str:
        """As shown; '' for what is not set."""
        value = self._shown[key].strip()
        return "" if value in ("(null)", "none", "None", "N/A") else value

    def words(self, key: str) -> frozenset[str]:
        """A comma separated list, lower case."""
        return frozenset(word for word in re.split(r"[,\s]+", self.text(key).lower()) if word)

    def seconds(self, key: str) -> float:
        """'300 sec', '5 min' or '0'. Raises ValueError for anything else."""
        found = re.fullmatch(r"(\d+)\s*(sec|min|hour)?\w*", self.text(key) or "0")
        if not found:
            raise ValueError(f"{key} = {self.text(key)!r}")
        return float(found[1]) * {"min": 60, "hour": 3600}.get(found[2] or "", 1)


def check_settings(shown: Mapping[str, str], version: tuple[int, int, int]) -> list[Finding]:
    """All of them; a setting that cannot be read is a finding too."""
    settings = Settings(shown)
    checks: tuple[Callable[[Settings], Finding], ...] = (
        batch_start_timeout,
        slurmd_timeout,
        message_timeout,
        unkillable_timeout,
        return_to_service,
        step_manager,
        lambda found: prolog_flags(found, version),
        select_type,
        processes,
        scheduler_parameters,
        interactive_step,
        private_data,
        health_program,
        port_range,
    )
    return [_one(check, settings) for check in checks]


def _one(check: Callable[[Settings], Finding], settings: Settings) -> Finding:
    try:
        return check(settings)
    except KeyError as error:
        return unknown("slurm.settings", f"this Slurm does not show {error.args[0]}")
    except ValueError as error:
        return unknown("slurm.settings", f"cannot read {error}")


def batch_start_timeout(settings: Settings) -> Finding:
    name, value = "slurm.BatchStartTimeout", settings.seconds("BatchStartTimeout")
    if value >= LONG_JOB_S:
        return ok(name, f"{value:g} s")
    return warn(
        name,
        f"{value:g} s: when a batch host comes back from a reboot, Slurm ends every job there that is older than that, "
        "--no-kill or not",
        "set BatchStartTimeout=65000 in slurm.conf and run: scontrol reconfigure",
    )


def slurmd_timeout(settings: Settings) -> Finding:
    name, value = "slurm.SlurmdTimeout", settings.seconds("SlurmdTimeout")
    if value == 0:
        return warn(
            name,
            "0: Slurm never marks a silent node DOWN, and keeps sending it jobs",
            "set SlurmdTimeout=300 in slurm.conf",
        )
    if value < REBOOT_S:
        return warn(
            name,
            f"{value:g} s: a node that needs longer to reboot is taken from its job for good and cannot return as a "
            "spare (recovery itself does not wait for Slurm)",
            "set SlurmdTimeout to the time a node needs to boot, for example 300",
        )
    return ok(name, f"{value:g} s")


def message_timeout(settings: Settings) -> Finding:
    name, value = "slurm.MessageTimeout", settings.seconds("MessageTimeout")
    if value > LONG_MESSAGE_S:
        return warn(
            name,
            f"{value:g} s: srun, and Slurm's own search for lost nodes, wait that long for each silent node",
            "set MessageTimeout to at most 60 in slurm.conf",
        )
    return ok(name, f"{value:g} s")


def unkillable_timeout(settings: Settings) -> Finding:
    name = "slurm.UnkillableStepTimeout"
    value, message = settings.seconds("UnkillableStepTimeout"), settings.seconds("MessageTimeout")
    if value < UNKILLABLE_FACTOR * message:
        return warn(
            name,
            f"{value:g} s is less than five times MessageTimeout ({message:g} s): a busy node is drained with 'Kill "
            "task failed' after a recovery has ended its tasks",
            f"set UnkillableStepTimeout={UNKILLABLE_FACTOR * message:g} in slurm.conf",
        )
    return ok(name, f"{value:g} s")


def return_to_service(settings: Settings) -> Finding:
    name, value = "slurm.ReturnToService", settings.text("ReturnToService")
    if value == "0":
        return warn(
            name,
            "0: a node that Slurm marked DOWN stays so after its reboot, until somebody resumes it; pools shrink",
            "set ReturnToService=2 in slurm.conf, unless you look at each node that was lost",
        )
    return ok(name, value)


def step_manager(settings: Settings) -> Finding:
    name = "slurm.stepmgr"
    if "enable_stepmgr" in settings.words("SlurmctldParameters"):
        return fail(
            name,
            "SlurmctldParameters has enable_stepmgr: every job's steps are managed on its first node, and no step can "
            "start once that node is lost. flashrec run refuses such jobs",
            "take enable_stepmgr out of SlurmctldParameters (users can still ask for it with --stepmgr)",
        )
    return ok(name, "off")


def prolog_flags(settings: Settings, version: tuple[int, int, int]) -> Finding:
    name, flags = "slurm.PrologFlags", settings.words("PrologFlags")
    if "contain" in flags and version < EXTERN_KEPT:
        return warn(
            name,
            "Contain: this Slurm ends a job's extern step on all nodes when one is lost, so pam_slurm_adopt, X11 and "
            "job_container stop working in that job; its ranks go on",
            "nothing needs to be done for recovery; Slurm 23.02.6 and later keep it",
        )
    return ok(name, ",".join(sorted(flags)) or "none")


def select_type(settings: Settings) -> Finding:
    name, value = "slurm.SelectType", settings.text("SelectType")
    if value in ("select/cons_tres", "select/cons_res"):
        return ok(name, value)
    return warn(
        name,
        f"{value}: replacement steps were tried with select/cons_tres only",
        "run the recovery of docs/admin/install.md once before you rely on it",
    )


def processes(settings: Settings) -> Finding:
    name, value = "slurm.ProctrackType", settings.text("ProctrackType")
    if value == "proctrack/cgroup":
        return ok(name, value)
    return warn(
        name,
        f"{value}: what a rank has started and detached (data loaders) may outlive it and hold its GPU memory",
        "set ProctrackType=proctrack/cgroup and TaskPlugin=task/cgroup,task/affinity in slurm.conf",
    )


def scheduler_parameters(settings: Settings) -> Finding:
    name, words = "slurm.SchedulerParameters", settings.words("SchedulerParameters")
    if any(word == "defer" or word.startswith("defer_") for word in words):
        return warn(
            name,
            "defer: a job gets no nodes when it is submitted, so a spare from the pool comes one round of the "
            "scheduler later",
            "keep spares in the allocation (spares=1) where seconds matter, or take defer out",
        )
    return ok(name, "jobs are tried when they are submitted")


def interactive_step(settings: Settings) -> Finding:
    name = "slurm.LaunchParameters"
    if "use_interactive_step" in settings.words("LaunchParameters"):
        return ok(name, "use_interactive_step: the shell of salloc, and so the manager, is on the job's first node")
    return ok(name, "the shell of salloc, and so the manager, is where salloc was called")


def private_data(settings: Settings) -> Finding:
    name, hidden = "slurm.PrivateData", settings.words("PrivateData") & {"nodes", "reservations"}
    if "nodes" in hidden:
        return warn(
            name,
            "nodes: users cannot see the state of their own nodes, so a drained or failing one is noticed late",
            "take nodes out of PrivateData",
        )
    if hidden:
        return warn(name, "reservations: users cannot see the pool", "take reservations out of PrivateData")
    return ok(name, "users see nodes and reservations")


def health_program(settings: Settings) -> Finding:
    name = "health.program"
    program, every = settings.text("HealthCheckProgram"), settings.seconds("HealthCheckInterval")
    if not program:
        return warn(
            name,
            "no HealthCheckProgram: a broken idle node, or spare, is found when a job needs it",
            "set HealthCheckProgram to flashrec-node-health and HealthCheckInterval=300: docs/admin/install.md",
        )
    if every == 0:
        return warn(
            name, f"{program}, but HealthCheckInterval is 0: it never runs", "set HealthCheckInterval=300 in slurm.conf"
        )
    if every > RARE_HEALTH_CHECK_S:
        return warn(name, f"{program} runs every {every:g} s only", "set HealthCheckInterval=300 in slurm.conf")
    return ok(name, f"{program} every {every:g} s, on nodes that are {settings.text('HealthCheckNodeState') or 'any'}")


def port_range(settings: Settings) -> Finding:
    name, value = "slurm.SrunPortRange", settings.text("SrunPortRange")
    if value in ("", "0-0"):
        return ok(name, "any")
    return warn(
        name,
        f"{value}: srun is kept to these ports, so there may be a firewall; flashrec's manager listens on any free one",
        "set control.port in the jobs' configuration to a port that nodes may reach (docs/reference/config.md)",
    )
