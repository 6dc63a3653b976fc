"""Mirrors: which rank holds the copy of whose state, and which holder restores a target.

The ranks are grouped by node. A node's ranks are held by those of the node that lies a fixed number of places further
on: the next one, or the nearest that is at another switch for as many nodes as possible. So every node holds the
mirrors of one other, and the loss of a node takes with it no shard together with its mirror.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashrec.core.types import Report


def holders(nodes: Sequence[str], switches: Sequence[str] = ()) -> dict[int, int]:
    """Rank -> its holder. nodes, switches: of each rank, by rank; no switches, or '' for one, where it is not known.

    Empty when there is one node only. Deterministic, so that every rank finds the same.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    order = list(ranks_of)  # by lowest rank
    if len(order) < 2:
        return {}
    switch_of = {node: switches[ranks[0]] if switches else "" for node, ranks in ranks_of.items()}

    def num_shared(places: int) -> int:
        pairs = ((node, order[(number + places) % len(order)]) for number, node in enumerate(order))
        return sum(switch_of[node] == switch_of[other] for node, other in pairs)

    places = min(range(1, len(order)), key=lambda places: (num_shared(places), places))
    found: dict[int, int] = {}
    for number, node in enumerate(order):
        there = ranks_of[order[(number + places) % len(order)]]
        found |= {rank: there[k % len(there)] for k, rank in enumerate(ranks_of[node])}
    return dict(sorted(found.items()))


def assign_holders(
    targets: Sequence[int], step: int, able: Sequence[int], reports: Mapping[int, Report]
) -> tuple[dict[int, int], tuple[int, ...]]:
    """Return (target -> holder with its complete mirror of `step`, targets without one). able: ranks that may send."""
    load = dict.fromkeys(able, 0)
    found: dict[int, int] = {}
    for target in targets:
        having = [rank for rank in load if step in reports[rank].holds.get(target, ())]
        if having:
            found[target] = min(having, key=lambda rank: (load[rank], rank))
            load[found[target]] += 1
    return found, tuple(target for target in targets if target not in found)
