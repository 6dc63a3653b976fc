"""What our own agents and workers may leave behind: processes and sockets of jobs that have ended.

A process is ours if it is an agent (`-m flashrec.agent`) or was started by one (FLASHREC_SOCKET in its environment). It
is left over if the job in its SLURM_JOB_ID has ended: Slurm shows it as ended, or shows all jobs and not this one, in
the cluster that the process names. A socket is left over if nobody listens at it and its job has ended.

--clean kills such processes (never one of root's) and removes such sockets; without it nothing is changed. Everything
in /proc/PID/environ and in /tmp belongs to a user: a lie in there costs that user's own process or socket, no more.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import re
import signal
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from _checklib import CommandError, Findings, command_output, main, parser_of

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
USER_FOLDER = re.compile(r"flashrec-(\d+)")
KEY = re.compile(r"(\d+)-[0-9a-f]+")


class Process(NamedTuple):
    pid: int
    uid: int
    job: int
    cluster: str


class Jobs(NamedTuple):
    """All jobs Slurm knows, by state, and the name of its cluster."""

    states: dict[int, str]
    cluster: str

    def has_ended(self, job: int, cluster: str | None) -> bool:
        """cluster: None if not known; a job Slurm does not know is older than its memory, or another cluster's."""
        if job in self.states:
            return self.states[job] in ENDED and (cluster is None or cluster == self.cluster)
        return cluster is None or cluster == self.cluster


def look(args: argparse.Namespace, found: Findings) -> None:
    processes = our_processes(args.proc)
    sockets = [name for folder in args.tmp or [Path("/tmp")] for name in dead_sockets(folder, args.node)]
    found.facts |= {"processes": len(processes), "dead_sockets": len(sockets)}
    if not processes and not sockets:
        return
    try:
        jobs = ask_slurm(args)
    except CommandError as err:
        found.unknown(f"Slurm could not be asked which jobs have ended: {err}")
        return
    for process in processes:
        if jobs.has_ended(process.job, process.cluster):
            handle_process(process, args, found)
    left = [item for item in sockets if jobs.has_ended(item[2], None)]
    removed = sum(remove_socket(folder, name, uid) for folder, name, _, uid in left) if args.clean else 0
    if removed < len(left):
        found.warn(f"{len(left) - removed} sockets of jobs that have ended")
    found.facts |= {"left_sockets": len(left), "removed_sockets": removed}


def our_processes(proc: Path) -> list[Process]:
    """Those whose job is known; others' environments cannot be read without root, and are passed over."""
    found = []
    for entry in os.scandir(proc):
        process = our_process(Path(entry.path)) if entry.name.isdigit() else None
        if process is not None:
            found.append(process)
    return found


def our_process(folder: Path) -> Process | None:
    try:
        environ = dict(
            word.partition("=")[::2] for word in (folder / "environ").read_text(errors="replace").split("\0") if word
        )
        command = (folder / "cmdline").read_text(errors="replace").split("\0")
        uid = (folder / "environ").stat().st_uid
    except OSError:
        return None
    is_agent = any(a == "-m" and b.startswith("flashrec.agent") for a, b in itertools.pairwise(command))
    job = environ.get("SLURM_JOB_ID", "")
    if not (is_agent or "FLASHREC_SOCKET" in environ) or not job.isdigit():
        return None
    return Process(int(folder.name), uid, int(job), environ.get("SLURM_CLUSTER_NAME", ""))


def handle_process(process: Process, args: argparse.Namespace, found: Findings) -> None:
    what = f"process {process.pid} of user {process.uid} is left over from job {process.job}"
    if not args.clean or process.uid == 0:
        found.fail(what)
    elif kill(process, args.proc):
        found.warn(f"{what}, killed")
    else:
        found.fail(f"{what} and could not be killed")


def kill(process: Process, proc: Path) -> bool:
    """Only if it is still the process that was looked at: the pidfd holds it while we look again."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if our_process(proc / str(process.pid)) == process:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return True
        return False
    except OSError:
        return False
    finally:
        os.close(pidfd)


def dead_sockets(tmp: Path, node: str) -> list[tuple[Path, str, int, int]]:
    """(folder, name, job, uid) of this node's agents' sockets at which nobody listens."""
    found = []
    for user_folder in sorted(tmp.glob("flashrec-*")):
        uid = USER_FOLDER.fullmatch(user_folder.name)
        if uid is None or not is_folder_of(user_folder, int(uid[1])):
            continue
        for folder in sorted(entry for entry in listed(user_folder) if KEY.fullmatch(entry.name)):
            job = KEY.fullmatch(folder.name)
            if job is None or not is_folder_of(folder, int(uid[1])):
                continue
            for name in (f"{node}.sock", f"{node}.sock.exit"):
                if is_dead_socket(folder / name):
                    found.append((folder, name, int(job[1]), int(uid[1])))
    return found


def is_folder_of(folder: Path, uid: int) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == uid


def listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def is_dead_socket(path: Path) -> bool:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
    except OSError:
        return False
    kind = socket.SOCK_DGRAM if path.name.endswith(".exit") else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def remove_socket(folder: Path, name: str, uid: int) -> bool:
    """Through descriptors of folders that belong to the user, so that no link leads anywhere else."""
    opened: list[int] = []
    try:
        opened.append(open_folder(folder.parent, uid))
        opened.append(open_folder(folder.name, uid, opened[0]))
        if not stat.S_ISSOCK(os.lstat(name, dir_fd=opened[1]).st_mode):
            return False
        os.unlink(name, dir_fd=opened[1])
        if not os.listdir(opened[1]):
            os.rmdir(folder.name, dir_fd=opened[0])
        return True
    except OSError:
        return False
    finally:
        for fd in opened:
            os.close(fd)


def open_folder(path: str | Path, uid: int, inside: int | None = None) -> int:
    """Raises OSError, also if it is a link or belongs to somebody else."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    if os.fstat(fd).st_uid != uid:
        os.close(fd)
        raise PermissionError(errno.EPERM, "belongs to somebody else", str(path))
    return fd


def ask_slurm(args: argparse.Namespace) -> Jobs:
    """Raises CommandError. Only fields that hold no user text are asked for."""
    listing = command_output([args.squeue, "--noheader", "--states=all", "--format=%A|%T"], args.timeout_s)
    states = {}
    for line in listing.splitlines():
        job, _, state = line.strip().partition("|")
        if not job.isdigit():
            raise CommandError(f"{args.squeue} answered in another form than expected")
        states[int(job)] = state
    config = command_output([args.scontrol, "show", "config"], args.timeout_s)
    name = re.search(r"^ClusterName +=(.*)$", config, re.MULTILINE)
    if name is None:
        raise CommandError(f"{args.scontrol} says no ClusterName")
    return Jobs(states, name[1].strip())


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--clean", action="store_true")
    parser.add_argument("--tmp", type=Path, action="append", metavar="DIR", help="where sockets are; default: /tmp")
    parser.add_argument("--node", default=os.environ.get("FLASHREC_NODE", ""), help="default: this one")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="for each command; default: %(default)s")
    parser.add_argument("--squeue", default="squeue")
    parser.add_argument("--scontrol", default="scontrol")
    parser.add_argument("--proc", type=Path, default=Path("/proc"))
    main("leftovers", parser, look)
