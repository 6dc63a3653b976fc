"""Host lists, through ClusterShell: never a split on commas. Order and padding are kept as Slurm wrote them."""

from __future__ import annotations

from collections.abc import Iterable

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException


def expand(hostlist: str) -> tuple[str, ...]:
    """'n[1-3,7]' → ('n1', 'n2', 'n3', 'n7'). Raises ValueError for what is not a host list."""
    if not hostlist:
        return ()
    try:
        return tuple(NodeSet(hostlist, resolver=RESOLVER_NOGROUP))
    except NodeSetException as err:
        raise ValueError(f"not a host list: {hostlist!r} ({err})") from err


def compress(nodes: Iterable[str]) -> str:
    """The shortest host list of these nodes; '' for none."""
    return str(NodeSet.fromlist(list(nodes), resolver=RESOLVER_NOGROUP))
