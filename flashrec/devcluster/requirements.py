"""What this machine must have before a dev cluster can start: each lack is named with the command that mends it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from flashrec.devcluster.errors import DevClusterError

# Daemons live where an ordinary user's PATH does not look, and a site may have built its own.
SEARCH_PATH = os.pathsep.join(
    [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin", "/opt/slurm/sbin", "/opt/slurm/bin"]
)
_PROGRAMS = {
    "slurmctld": "apt-get install slurmctld slurmd slurm-client munge",
    "slurmd": "apt-get install slurmctld slurmd slurm-client munge",
    "srun": "apt-get install slurmctld slurmd slurm-client munge",
    "scontrol": "apt-get install slurmctld slurmd slurm-client munge",
    "sinfo": "apt-get install slurmctld slurmd slurm-client munge",
    "munged": "apt-get install munge",
    "ip": "apt-get install iproute2",
    "tc": "apt-get install iproute2",
    "nft": "apt-get install nftables",
    "nsenter": "apt-get install util-linux",
    "unshare": "apt-get install util-linux",
    "setpriv": "apt-get install util-linux",
}


class MissingRequirementError(DevClusterError):
    """The machine lacks something; the message has one line for each lack."""


def find_program(name: str) -> str:
    """Absolute path of a program; MissingRequirementError with the remedy if there is none."""
    path = shutil.which(name, path=SEARCH_PATH)
    if path is None:
        raise MissingRequirementError(_missing(name))
    return path


def check_requirements(
    *,
    which: Callable[[str], str | None] = lambda name: shutil.which(name, path=SEARCH_PATH),
    is_root: Callable[[], bool] = lambda: os.geteuid() == 0,
    try_namespaces: Callable[[], str | None] | None = None,
    platform: str = sys.platform,
) -> None:
    """Raise MissingRequirementError naming everything that is missing, not only the first."""
    if platform != "linux":
        raise MissingRequirementError(f"needs Linux namespaces; this is {platform}")
    lacks = [_missing(name) for name in _PROGRAMS if which(name) is None]
    if not is_root():
        lacks.append("needs root: run with sudo")
    elif which("unshare") is not None:
        reason = (try_namespaces or _try_namespaces)()
        if reason:
            lacks.append(
                f"cannot create network namespaces: {reason}; in a container, start it with"
                " --privileged (or CAP_SYS_ADMIN, CAP_NET_ADMIN and an unconfined seccomp and AppArmor profile)"
            )
    if lacks:
        raise MissingRequirementError("\n".join(dict.fromkeys(lacks)))


def _missing(name: str) -> str:
    return f"{name} not found: {_PROGRAMS.get(name, 'install it')}"


def _try_namespaces() -> str | None:
    """What `up` will do, once, and thrown away; the reason if the kernel or a container does not let us."""
    script = (
        "ip link add name v0 type veth peer name v1"
        " && ip link add name br0 type bridge && ip link set dev v0 master br0"
    )
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", script],
        env={**os.environ, "PATH": SEARCH_PATH},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
