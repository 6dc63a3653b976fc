"""The search for room: a node for every rank that has none, from the allocation, from the pool, or by waiting.

A rank goes to a trusted node of the allocation; then the pool is asked; then a node that is not trusted is used; then
the job waits up to `spare_wait_s` for a node to come back. Pure: members and the pool's answers in, a placement out.
"""

from __future__ import annotations

import msgspec

from flashrec.core.effects import AnyEffect
from flashrec.core.limits import Limits
from flashrec.core.membership import Members
from flashrec.core.placement import place
from flashrec.core.pool import PoolTier

Placement = dict[str, dict[int, int]]  # node -> {rank: local rank}


class RoomSearch(msgspec.Struct):
    """deadline: until when ranks without a node wait for one to come back; None: nobody waits."""

    pool: PoolTier
    deadline: float | None = None

    @property
    def waits_until(self) -> float | None:
        """Until when ranks without a node wait: for the pool, then for a node to come back."""
        return self.pool.deadline if self.pool.is_waiting else self.deadline

    def find(
        self, members: Members, limits: Limits, reason: str, now: float
    ) -> tuple[Placement | None, list[AnyEffect]]:
        """A place for every rank without a worker, or None while they wait; and what is asked of the pool."""
        lost = {slot.rank: slot.node for slot in members.unplaced()}
        rooms = members.rooms(limits.max_in_place)
        placed, shortage = place(lost, rooms)
        homeless = place(lost, [room for room in rooms if room.trusted])[1]
        asked: list[AnyEffect] = []
        if homeless is not None:
            num_nodes = -(-len(homeless.ranks) // members.ranks_per_node)
            asked += self.pool.ask(num_nodes, reason, now)
        if shortage is not None or (homeless is not None and self.pool.is_waiting):
            if self.deadline is None:
                is_first_start = not members.has_launched
                self.deadline = now + (0.0 if is_first_start else limits.spare_wait_s)
            return None, asked
        self.deadline = None
        return placed, asked + self.pool.settle("every rank has a node")

    @staticmethod
    def fits(members: Members, limits: Limits) -> bool:
        """Every rank without a worker has a place on a trusted node of the job, now."""
        rooms = [room for room in members.rooms(limits.max_in_place) if room.trusted]
        return place({slot.rank: slot.node for slot in members.unplaced()}, rooms)[1] is None

    def forget(self) -> None:
        """A new generation searches anew."""
        self.deadline = None
