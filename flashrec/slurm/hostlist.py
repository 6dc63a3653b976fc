"""Host lists, through ClusterShell: never a split on commas. Padding is kept as Slurm wrote it; names come out sorted.

ClusterShell's own language is larger (groups, set operators, spaces): what Slurm does not write is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

_HOSTLIST = re.compile(r"[A-Za-z0-9_.,\[\]-]+")

_SUFFIX = re.compile(r"\][^,\[\]]+(?:,|$)")  # text after brackets, as in n[1-3].dc1, is refused until 23.11


def expand(hostlist: str) -> tuple[str, ...]:
    """'n[1-3,7]' → ('n1', 'n2', 'n3', 'n7'). Raises ValueError for what is not a host list."""
    if not hostlist:
        return ()
    if not _HOSTLIST.fullmatch(hostlist):
        raise ValueError(f"not a host list: {hostlist!r}")
    try:
        return tuple(NodeSet(hostlist, resolver=RESOLVER_NOGROUP))
    except NodeSetException as err:
        raise ValueError(f"not a host list: {hostlist!r} ({err})") from err


def compress(nodes: Iterable[str]) -> str:
    """A short host list of these nodes that every Slurm can read; '' for none."""
    names = NodeSet.fromlist(list(nodes), resolver=RESOLVER_NOGROUP)
    short = str(names)
    return ",".join(names) if _SUFFIX.search(short) else short
