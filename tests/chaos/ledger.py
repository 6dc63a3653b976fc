"""The replica rule, applied from outside: who holds a whole state, by what was seen of deaths and restores.

A refusal is right when all ranks of some replica group are without a state at the same time; a plan is wrong when that
is certain. In between is a target that has begun to receive: whether it got everything is known to itself alone. What
the workers say about their state is not believed, except that an update was cut; what they say about who holds the same
shards has to be what the table of layouts says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashrec.core.commit import Impossible
from flashrec.core.types import Plan, Report


class Ledger:
    """groups: the replica groups of the layout, as written down in its table."""

    def __init__(self, groups: Sequence[frozenset[int]]) -> None:
        self._groups = groups
        self.without: set[int] = set()  # lost, and not seen to be restored since
        self._receiving: set[int] = set()
        self._lives: dict[int, int] = {}  # newest life of a rank that is known to be lost
        self.refusals: list[str] = []  # 'lost' or 'torn'
        self.problems: list[str] = []

    def lose(self, rank: int, life: int) -> None:
        self.without.add(rank)
        self._receiving.discard(rank)
        self._lives[rank] = max(life, self._lives.get(rank, 0))

    def begin_restore(self, rank: int) -> None:
        if rank in self.without:
            self._receiving.add(rank)

    def restored(self, rank: int, life: int) -> None:
        """What a life says that is lost already comes too late."""
        if life > self._lives.get(rank, 0):
            self.without.discard(rank)
            self._receiving.discard(rank)

    def judge(self, reports: Mapping[int, Report], verdict: Plan | Impossible) -> None:
        """Compare the decision with the rule, and what each rank says of its replicas with the table."""
        for rank, report in reports.items():
            if (said := frozenset({rank, *report.replicas})) not in self._groups:
                self.problems.append(f"rank {rank} says that its replicas are {sorted(said)}")
        torn = {rank for rank, report in reports.items() if not report.valid} - self.without
        certain = self.without - self._receiving
        if isinstance(verdict, Plan):
            for group in self._groups:
                if group <= certain:
                    self.problems.append(f"a plan, but nobody of {sorted(group)} has a state: {verdict}")
        elif any(group <= self.without for group in self._groups):
            self.refusals.append("lost")
        elif any(group <= self.without | torn for group in self._groups):
            self.refusals.append("torn")
        else:
            self.problems.append(f"refused with {sorted(self.without)} lost and {sorted(torn)} torn: {verdict}")


class MirrorLedger(Ledger):
    """Of a layout in which each rank has only itself and the mirror that the next rank holds. Good for one loss, and
    for that of a source on top of it: later ones may find what is not mirrored again yet."""

    def judge(self, reports: Mapping[int, Report], verdict: Plan | Impossible) -> None:
        for rank, report in reports.items():
            if tuple(report.replicas) != (rank,):
                self.problems.append(f"rank {rank} says that its replicas are {sorted(report.replicas)}")
        certain = self.without - self._receiving
        if isinstance(verdict, Plan):
            for rank in certain:
                holder = (rank + 1) % len(self._groups)
                if rank not in verdict.mirrored or verdict.sources.get(rank) != holder or holder in certain:
                    self.problems.append(f"a plan that does not restore rank {rank} from its mirror: {verdict}")
        elif any((rank + 1) % len(self._groups) in self.without for rank in self.without):
            self.refusals.append("lost")
        else:
            self.problems.append(f"refused with {sorted(self.without)} lost: {verdict}")
