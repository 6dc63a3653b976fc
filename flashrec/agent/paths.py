"""Which node this is. The paths of its sockets: flashrec.transport.paths."""

from __future__ import annotations

import os


def this_node() -> str:
    """Slurm's name of this node (the local launcher sets FLASHREC_NODE). Never guessed from the host name."""
    node = os.environ.get("FLASHREC_NODE") or os.environ.get("SLURMD_NODENAME")
    if not node:
        raise LookupError("neither SLURMD_NODENAME nor FLASHREC_NODE is set: this runs as a task of flashrec only")
    return node
