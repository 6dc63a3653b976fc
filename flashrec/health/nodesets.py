"""Which nodes a line of the check file is for: one or more terms, separated by blanks.

*             every node
n[1-8,12]     a host list, as Slurm writes them (through ClusterShell)
gpu*          a name with * and ? in it
@a100         nodes that Slurm says have this feature
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Sequence

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

_GLOB = re.compile(r"[A-Za-z0-9_.*?-]+")
_FEATURE = re.compile(r"@[A-Za-z0-9_.:=+-]+")
_HOSTLIST = re.compile(r"[A-Za-z0-9_.,\[\]-]+")


def check_term(term: str) -> None:
    """Raises ValueError for what is none of the four forms."""
    if term.startswith("@"):
        if not _FEATURE.fullmatch(term):
            raise ValueError(f"{term!r} is not a feature: @ and a name")
    elif "*" in term or "?" in term:
        if not _GLOB.fullmatch(term):
            raise ValueError(f"{term!r}: * and ? go with letters, digits, '-', '_' and '.', not with brackets")
    elif not _HOSTLIST.fullmatch(term):
        raise ValueError(f"{term!r} is not a host list")
    else:
        _nodes(term)


def is_member(node: str, terms: Sequence[str], features: Collection[str] | None) -> bool | None:
    """True if one of the terms names the node. None: it depends on the node's features, and those are not known."""
    unknown = False
    for term in terms:
        if term.startswith("@"):
            if features is None:
                unknown = True
            elif term[1:] in features:
                return True
        elif "*" in term or "?" in term:
            if fnmatch.fnmatchcase(node, term):
                return True
        elif node in _nodes(term):
            return True
    return None if unknown else False


def _nodes(term: str) -> NodeSet:
    try:
        return NodeSet(term, resolver=RESOLVER_NOGROUP)
    except NodeSetException as err:
        raise ValueError(f"{term!r} is not a host list ({err})") from err
