"""Rendezvous of process groups: keys posted by one rank are pushed to the members of its group, never polled for.

One table per generation; a newer one forgets the older. Pure bookkeeping: `post` and `add` return what to send. All
nodes with members of a group get the same message, so that it is encoded once, and what several members have posted
since the last flush goes in one. (So a poster may get its own key back, which changes nothing.)
"""

from __future__ import annotations

from collections.abc import Callable

from flashrec.core.ranks import RankSet
from flashrec.wire import messages as m


class Rendezvous:
    """nodes_of tells on which nodes a rank has workers that take part: none, one, or in a planned swap two."""

    def __init__(self, nodes_of: Callable[[int], tuple[str, ...]]) -> None:
        self._nodes_of = nodes_of
        self._generation = 0
        self._counters: dict[tuple[str, str], int] = {}
        self._pending: dict[tuple[str, RankSet], dict[str, bytes]] = {}
        self._nodes: dict[RankSet, tuple[str, ...]] = {}  # of a group, since `generation` began

    def begin(self, generation: int) -> None:
        """Forget everything older than `generation`, and where its ranks were."""
        if generation > self._generation:
            self._generation, self._counters, self._pending = generation, {}, {}
        self._nodes = {}

    def post(self, key: m.KeyPosted) -> bool:
        """Take a key; True if this is the first since the last `flush` (so: arrange one)."""
        if key.generation != self._generation:
            return False
        first = not self._pending
        members: RankSet = key.members
        if members == (key.rank, key.rank):  # from one life of a rank to the other
            members = (key.rank,)
        elif members == (key.rank,):
            return False  # nobody else
        self._pending.setdefault((key.group, members), {})[key.key] = key.value
        return first

    def flush(self) -> list[tuple[tuple[str, ...], list[m.KeysPushed]]]:
        """(nodes, messages) for everything posted since the last flush: one message per group, those for the same nodes
        together."""
        out: dict[tuple[str, ...], list[m.KeysPushed]] = {}
        for (group, members), items in self._pending.items():
            if members not in self._nodes:
                self._nodes[members] = tuple(dict.fromkeys(node for rank in members for node in self._nodes_of(rank)))
            if self._nodes[members]:
                keys = m.KeysPushed(self._generation, group, items, members)
                out.setdefault(self._nodes[members], []).append(keys)
        self._pending = {}
        return list(out.items())

    def add(self, request: m.CounterAdded) -> m.CounterValue | None:
        """Add to a counter; None for an older generation."""
        if request.generation != self._generation:
            return None
        key = (request.group, request.key)
        self._counters[key] = self._counters.get(key, 0) + request.amount
        return m.CounterValue(request.rank, request.incarnation, request.request, self._counters[key])
