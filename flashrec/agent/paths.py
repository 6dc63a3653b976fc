"""Where an agent's unix socket lives: outside the job directory (a shared filesystem cannot carry sockets), one
private directory per user and job. Agent and launcher compute the same path from the same three words.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MAX_SOCKET_PATH = 107  # sun_path


def socket_directory(key: str) -> Path:
    """Directory (mode 0700) of all agents of one job on this machine."""
    return Path(tempfile.gettempdir()) / f"flashrec-{os.geteuid()}" / key


def socket_path(key: str, node: str) -> Path:
    """Unix socket of the agent on `node`. Raises ValueError when it would not fit into a socket address."""
    path = socket_directory(key) / f"{node}.sock"
    if len(str(path)) > MAX_SOCKET_PATH:
        raise ValueError(
            f"{path} is too long for a unix socket ({MAX_SOCKET_PATH} bytes): set TMPDIR to a shorter path"
        )
    return path


def this_node() -> str:
    """Slurm's name of this node (the local launcher sets FLASHREC_NODE). Never guessed from the host name."""
    node = os.environ.get("FLASHREC_NODE") or os.environ.get("SLURMD_NODENAME")
    if not node:
        raise LookupError("neither SLURMD_NODENAME nor FLASHREC_NODE is set: this runs as a task of flashrec only")
    return node
