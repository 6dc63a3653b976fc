"""Rendezvous of process groups: keys posted by one rank are pushed to the members of its group, never polled for.

One table per generation; a newer one forgets the older. Pure bookkeeping: `post` and `add` return what to send.
"""

from __future__ import annotations

from collections.abc import Callable

from flashrec.wire import messages as m


class Rendezvous:
    """nodes_of tells on which nodes a rank has workers that take part: none, one, or in a planned swap two."""

    def __init__(self, nodes_of: Callable[[int], tuple[str, ...]]) -> None:
        self._nodes_of = nodes_of
        self._generation = 0
        self._counters: dict[tuple[str, str], int] = {}
        self._pending: dict[tuple[str, tuple[int, ...]], dict[str, bytes]] = {}

    def begin(self, generation: int) -> None:
        """Forget everything older than `generation`."""
        if generation > self._generation:
            self._generation, self._counters, self._pending = generation, {}, {}

    def post(self, key: m.KeyPosted) -> bool:
        """Take a key; True if this is the first since the last `flush` (so: arrange one)."""
        if key.generation != self._generation:
            return False
        first = not self._pending
        members = tuple(rank for rank in key.members if rank != key.rank)
        if key.members == (key.rank, key.rank):  # from one life of a rank to the other
            members = (key.rank,)
        self._pending.setdefault((key.group, members), {})[key.key] = key.value
        return first

    def flush(self) -> list[tuple[str, m.KeysPushed]]:
        """(node, message) for everything posted since the last flush: one message per group, poster and node."""
        out = []
        for (group, members), items in self._pending.items():
            by_node: dict[str, list[int]] = {}
            for rank in members:
                for node in self._nodes_of(rank):
                    by_node.setdefault(node, []).append(rank)
            for node, ranks in by_node.items():
                out.append((node, m.KeysPushed(self._generation, group, items, tuple(ranks))))
        self._pending = {}
        return out

    def add(self, request: m.CounterAdded) -> m.CounterValue | None:
        """Add to a counter; None for an older generation."""
        if request.generation != self._generation:
            return None
        key = (request.group, request.key)
        self._counters[key] = self._counters.get(key, 0) + request.amount
        return m.CounterValue(request.rank, request.incarnation, request.request, self._counters[key])
