"""The machine we are on, a login node or a node: what processes of flashrec need of it. Nothing here asks Slurm's
controller, so that this part can run on each node."""

from __future__ import annotations

import os
import re
import resource
import socket
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flashrec.admin.doctor.finding import Finding, fail, ok, unknown, warn
from flashrec.slurm.command import Commands
from flashrec.slurm.scheduler import SlurmError

MAX_SOCKET_PATH = 107  # sun_path
SOCKET_NAME_BYTES = 64  # KEY/NODE.sock.exit below flashrec-UID
MIN_FILES = 1024
SHARED_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "cifs", "smb3", "9p", "virtiofs", "pvfs2",
     "orangefs", "weka", "wekafs", "panfs", "glusterfs", "fuse.glusterfs", "fuse.juicefs", "vast", "afs", "quobyte"}
)  # fmt: skip


async def check_machine(
    commands: Commands, environ: Mapping[str, str], *, auth_info: str = "", num_nodes: int = 0, port: int = 0
) -> list[Finding]:
    """auth_info: AuthInfo of slurm.conf. port: control.port of the configuration, 0: any."""
    return [
        await munge(commands, auth_info),
        open_files(num_nodes),
        temporary_folder(),
        interface(environ),
        control_port(port),
    ]


async def munge(commands: Commands, auth_info: str) -> Finding:
    """A credential made here must be good here; a wrong key or clock shows when nodes talk to each other."""
    name = "munge.local"
    found = re.search(r"socket=([^,\s]+)", auth_info)
    option = [f"--socket={found[1]}"] if found else []
    try:
        made = await commands.run("munge", "--no-input", *option)
        if made.exit_code != 0:
            return fail(name, f"munge: {_first(made.said)}", "start munged: systemctl start munge")
        # A pipe would need a shell; unmunge takes the credential from a file.
        with tempfile.NamedTemporaryFile("w", prefix="flashrec-doctor-") as file:
            file.write(made.out)
            file.flush()
            read = await commands.run("unmunge", f"--input={file.name}", *option)
    except SlurmError as error:
        return unknown(name, _first(str(error)), "install munge's commands here if Slurm uses auth/munge")
    except OSError as error:
        return unknown(name, f"no temporary file can be made: {error.strerror}")
    if read.exit_code != 0:
        return fail(name, f"unmunge: {_first(read.said)}", "see munged's log; the clock may be wrong")
    return ok(name, "a credential was made and read")


def open_files(num_nodes: int) -> Finding:
    """The manager holds one connection a node, a rank of gloo two a rank and group."""
    name, (soft, hard) = "machine.open-files", resource.getrlimit(resource.RLIMIT_NOFILE)
    need = max(MIN_FILES, 4 * num_nodes + 256)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return ok(name, f"{'unlimited' if soft == resource.RLIM_INFINITY else soft}")
    return warn(
        name,
        f"a process may open {soft} files (at most {'unlimited' if hard == resource.RLIM_INFINITY else hard}); on all "
        f"{num_nodes} nodes flashrec may need {need}",
        f"raise the limit, here and for slurmd (LimitNOFILE=) : ulimit -n {need}",
    )


def temporary_folder() -> Finding:
    """Agents' sockets live in $TMPDIR/flashrec-UID, which must be ours alone."""
    name, folder = "machine.TMPDIR", Path(tempfile.gettempdir())
    mine = folder / f"flashrec-{os.geteuid()}"
    if len(str(mine)) + SOCKET_NAME_BYTES > MAX_SOCKET_PATH:
        return fail(
            name,
            f"{folder} is so long a path that no unix socket fits below it ({MAX_SOCKET_PATH} bytes)",
            "set TMPDIR to a shorter path, for example /tmp",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        return fail(name, f"{folder} cannot be written to", "set TMPDIR to a folder of this node that can be")
    try:
        found = os.lstat(mine)
    except FileNotFoundError:
        return ok(name, str(folder))
    except OSError as error:
        return unknown(name, f"{mine}: {error.strerror}")
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        return fail(name, f"{mine} is not a folder of ours alone (mode 0700)", f"remove {mine}; who has made it?")
    return ok(name, str(folder))


def interface(environ: Mapping[str, str]) -> Finding:
    """Interfaces that the environment names for gloo and NCCL; else the address that the agent found is used."""
    name = "machine.interface"
    known = sorted(found for _, found in socket.if_nameindex())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = environ.get(variable, "")
        wanted = [] if text.startswith("^") else [word for word in text.lstrip("=").split(",") if word]
        exact = variable.startswith("GLOO") or text.startswith("=")
        lost = [w for w in wanted if not any(w == k or (not exact and k.startswith(w)) for k in known)]
        if lost:
            return fail(
                name,
                f"{variable}={text}, and there is no {', '.join(lost)} here (there are {', '.join(known)})",
                f"unset {variable}, or name an interface that all nodes have",
            )
    others = [found for found in known if found != "lo"]
    if not others:
        return fail(name, "there is no network interface but lo", "bring the network up")
    return ok(name, ", ".join(others))


def control_port(port: int) -> Finding:
    """The port of control.port, if the configuration names one, must be free where the manager runs."""
    name = "machine.control-port"
    if port == 0:
        return ok(name, "any free port (control.port is 0)")
    try:
        with socket.create_server(("", port)):
            return ok(name, f"{port} is free")
    except OSError as error:
        return warn(
            name,
            f"port {port} (control.port) cannot be used here now: {error.strerror}",
            "choose another one if this node runs managers; two jobs on one node need two ports",
        )


def file_system(folder: Path, mounts: str) -> Finding:
    """Whether job directories made here are on a file system that nodes share. mounts: /proc/self/mounts."""
    name = "machine.job-dir"
    best, kind = "", ""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) > 2:
            point = words[1].replace("\\040", " ")
            if (folder == Path(point) or Path(point) in folder.parents) and len(point) >= len(best):
                best, kind = point, words[2]
    if not kind:
        return unknown(name, f"no mount holds {folder}")
    if kind in SHARED_FILE_SYSTEMS:
        return ok(name, f"{folder} is on {kind} ({best})")
    return unknown(
        name,
        f"{folder} is on {kind} ({best}), usually this machine's alone; a job directory must be seen by all nodes",
        "run this where jobs are started, with --nodes: then it is tried",
    )


def _first(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "it said nothing"
