"""PID 1 of a station: makes the namespaces, then only reaps.

A node of the dev cluster *is* this process: the kernel kills everything in a PID namespace with its init, and network,
mount, UTS and IPC namespaces live as long as a process is in them. So nothing is mounted on the machine, nothing has a
name there, and SIGKILL to this one process is the end of the node.

Run as a program (`python -I -S nodeinit.py STATION HOSTS`) by `station.boot_all`, standard library only, importing
nothing of ours. Protocol: it makes the namespaces, forks PID 1, which says who it is in one line of JSON on standard
output, and waits for the word `go` on standard input. The other end writes that down before it says `go`. End of file
instead means that it died half-way: the init exits, so there never is one that nobody knows of. It writes no file
itself: by then the folder may belong to the next `up`.
"""

import ctypes
import json
import os
import signal
import socket
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(what: str, result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        sys.exit(f"{what}: {os.strerror(error)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(f"mount {kind or source} on {target}", _libc.mount(*arguments))


def _identity() -> dict[str, object]:
    """This process as the machine sees it: /proc is still the machine's when this is called."""
    pid = os.readlink("/proc/self")
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        start_time = int(stat.read().rpartition(")")[2].split()[19])
    return {"pid": int(pid), "start_time": start_time, "pid_namespace": os.stat(f"/proc/{pid}/ns/pid").st_ino}


def _furnish(station: str, hosts: str) -> None:
    # Private first: what is mounted below would otherwise show up on the machine.
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # A node has its own memory: what lies in /dev/shm dies with it. /tmp and homes stay shared, as on a cluster.
    _mount("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    _mount(hosts, "/etc/hosts", "", MS_BIND)
    socket.sethostname(station)


def _reap_forever() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


def main(station: str, hosts: str) -> None:
    namespaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWPID
    _check("cannot create namespaces", _libc.unshare(namespaces))
    if os.fork() != 0:
        os._exit(0)  # PID 1 now belongs to the machine's init, not to whoever called
    identity = _identity()
    _furnish(station, hosts)
    print(json.dumps(identity), flush=True)
    if sys.stdin.readline() != "go\n":
        sys.exit(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir("/")
    _reap_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
