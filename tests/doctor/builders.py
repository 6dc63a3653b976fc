"""Facts as a healthy cluster gives them, to be spoilt one at a time."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from flashrec.admin.doctor.facts import Facts, Missing
from flashrec.admin.doctor.finding import Finding, Status
from flashrec.admin.doctor.plugstack import PluginLine
from flashrec.slurm.scheduler import NodeInfo, ReservationInfo

HEALTHY = {
    "AuthInfo": "(null)",
    "BatchStartTimeout": "65000 sec",
    "CliFilterPlugins": "cli_filter/lua",
    "ClusterName": "tux",
    "Epilog": "(null)",
    "HealthCheckInterval": "300 sec",
    "HealthCheckNodeState": "ANY",
    "HealthCheckProgram": "/usr/sbin/flashrec-node-health",
    "JobSubmitPlugins": "lua",
    "LaunchParameters": "(null)",
    "MessageTimeout": "10 sec",
    "PluginDir": "/usr/lib/slurm",
    "PlugStackConfig": "/etc/slurm/plugstack.conf",
    "PrivateData": "none",
    "ProctrackType": "proctrack/cgroup",
    "PrologFlags": "Alloc,Contain",
    "ReturnToService": "2",
    "SchedulerParameters": "bf_interval=30",
    "SelectType": "select/cons_tres",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_VERSION": "24.11.5",
    "SlurmctldParameters": "(null)",
    "SlurmdTimeout": "300 sec",
    "SrunPortRange": "0-0",
    "UnkillableStepTimeout": "60 sec",
}


def node(name: str = "n1", **changes: Any) -> NodeInfo:
    whole = NodeInfo(
        name=name, address=name, states=frozenset({"IDLE"}), features=(), active_features=(), partitions=("main",),
        reason="", reason_by="", comment="", gres="", version="24.11.5", num_cpus=8, num_cpus_allocated=0,
        memory_mb=1000, boot_time=0.0,
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


def reservation(**changes: Any) -> ReservationInfo:
    whole = ReservationInfo(
        name="flashspare", nodes=("n4",), node_count=1, users=("-daemon",), accounts=(),
        flags=frozenset({"IGNORE_JOBS", "SPEC_NODES"}), features="", partition="", start_time=0.0, end_time=4e9,
        is_active=True,
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


def facts(config: dict[str, str] | None = None, **changes: Any) -> Facts:
    """`config`: what differs from HEALTHY."""
    whole = Facts(
        config=HEALTHY | (config or {}),
        client=(24, 11, 5),
        clock=(1000.0, 1000.5),
        nodes={"n1": node("n1"), "n4": node("n4", features=("flashspare",))},
        reservations=(reservation(),),
        jobs=(),
        sharing={"main": "EXCLUSIVE"},
        help_text=("  --flashrecovery[=SPEC]", ""),
    )
    return msgspec.structs.replace(whole, **changes)


UNASKED = Missing("the controller did not answer")
NOTHING = Facts(*[UNASKED] * len(msgspec.structs.fields(Facts)))


def line(*arguments: str, required: bool = False) -> PluginLine:
    return PluginLine(Path("/etc/slurm/plugstack.conf"), required, "flashrecovery.so", arguments)


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def not_ok(findings: Iterable[Finding]) -> list[str]:
    return [finding.check for finding in findings if finding.status is not Status.OK]


def build_plugin(
    path: Path, version: int, name: str = "flashrecovery", kind: str = "spank", contract: str = "1"
) -> Path:
    """A shared object with the three symbols that Slurm reads before it loads a plugin, and our own."""
    source = path.with_suffix(".c")
    source.write_text(
        f'const char plugin_name[] = "{name}";\nconst char plugin_type[] = "{kind}";\n'
        f'const char flashrec_contract[] = "{contract}";\n'
        f"const unsigned int plugin_version = {version};\nint slurm_spank_init(void) {{ return 0; }}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    return path
