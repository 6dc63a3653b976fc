"""Replica feasibility: which survivors can restore a target, and which of them does.

A source must be in the replica group of the target, hold a valid state, and be (or be about to be, after its own
optimizer step) at the resume step. Work is spread: the least loaded candidate sends, ranks that are already there
before ranks that must roll forward first, then the lowest rank. Candidates that are left without work then send parts
(stripes) of the state of a target that already has a source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashrec.core.types import Report

MAX_STRIPES = 4  # sources of one target: beyond that its own network and memory are the limit


def assign_sources(
    targets: Sequence[int], ready: Sequence[int], forward: Sequence[int], reports: Mapping[int, Report]
) -> tuple[dict[int, int], tuple[int, ...]]:
    """Return (target -> source, targets without any possible source)."""
    load = dict.fromkeys([*ready, *forward], 0)
    late = set(forward)
    sources: dict[int, int] = {}
    orphans: list[int] = []
    groups = ReplicaGroups(reports)
    for target in targets:
        group = groups.of(target)
        candidates = [rank for rank in load if rank in group]
        if not candidates:
            orphans.append(target)
            continue
        source = min(candidates, key=lambda rank: (rank in late, load[rank], rank))
        load[source] += 1
        sources[target] = source
    return sources, tuple(orphans)


def assign_stripes(
    sources: Mapping[int, int], ready: Sequence[int], reports: Mapping[int, Report]
) -> dict[int, tuple[int, ...]]:
    """Return target -> further sources, for those that have any. Each sends to one target only, so nobody waits for
    anybody; at most MAX_STRIPES sources a target."""
    busy = set(sources.values())
    known = ReplicaGroups(reports)
    groups = {target: known.of(target) for target in sources}
    stripes: dict[int, tuple[int, ...]] = {}
    for rank in sorted(set(ready) - busy):
        having = [target for target in groups if rank in groups[target]]
        if having:
            target = min(having, key=lambda t: (len(stripes.get(t, ())), t))
            stripes[target] = (*stripes.get(target, ()), rank)
            if len(stripes[target]) == MAX_STRIPES - 1:
                del groups[target]
        if not groups:
            break
    return stripes


class ReplicaGroups:
    """Who holds the same shard as whom: what a rank says itself, or what others say that name it. Ranks of one group
    say the same, so it is gone through once for all of them."""

    def __init__(self, reports: Mapping[int, Report]) -> None:
        self._said = [frozenset(said) for said in {report.replicas for report in reports.values()}]
        self._own = {rank: report.replicas for rank, report in reports.items()}

    def of(self, rank: int) -> frozenset[int]:
        """The other ranks that hold the shard of `rank`."""
        naming = [said for said in self._said if rank in said]
        return frozenset().union(self._own.get(rank, ()), *naming) - {rank}
