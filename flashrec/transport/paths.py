"""Where an agent's unix sockets live: outside the job directory (a shared filesystem cannot carry sockets), one private
directory per user and job. Manager, agent and launcher compute the same paths from the same words.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

MAX_SOCKET_PATH = 107  # sun_path
NODE_NAME = "%N"  # in a path that is said for all nodes at once, in place of the node's name
_EXIT = ".exit"


def socket_directory(key: str, tmp: str = "") -> Path:
    """Directory (mode 0700) of all agents of one job on this machine. tmp: the manager's TMPDIR.

    It is used where it can be, so that a task without the job's environment (--export=NONE) finds its agent."""
    base = tmp if tmp and os.access(tmp, os.W_OK | os.X_OK) else tempfile.gettempdir()
    return Path(base) / f"flashrec-{os.geteuid()}" / key


def socket_path(key: str, node: str, tmp: str = "") -> Path:
    """Unix socket of the agent on `node`. Raises ValueError when it would not fit into a socket address."""
    path = socket_directory(key, tmp) / f"{node}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ValueError(
            f"{path} is too long for a unix socket ({MAX_SOCKET_PATH} bytes): set TMPDIR to a shorter path"
        )
    return path


def page_path(socket: Path, rank: int, incarnation: int) -> Path:
    """Where a worker writes where it is, for the agent with this socket to read (`transport.page`)."""
    return socket.with_name(f"{socket.name}.{rank}.{incarnation}.page")


def stacks_path(socket: Path, rank: int, incarnation: int) -> Path:
    """Where a worker writes its stacks, upon a signal of the agent with this socket."""
    return socket.with_name(f"{socket.name}.{rank}.{incarnation}.stacks")


def memory_directory(socket: Path) -> Path:
    """Where the workers of the agent with this socket put their state aside: in the memory of the node."""
    name = hashlib.sha256(os.fsencode(socket)).hexdigest()[:16]
    return Path("/dev/shm") / f"flashrec-{os.geteuid()}-{name}"


def state_path(socket: Path, rank: int, generation: int) -> Path:
    """The state that `rank` has put aside in `generation`."""
    return memory_directory(socket) / f"rank-{rank}.{generation}"


def exit_socket_path(socket: Path) -> Path:
    """Where the agent with this socket is told by Slurm's plugin how its tasks ended (plugin-contract.md)."""
    return socket.with_name(socket.name + _EXIT)
