"""Membership: the nodes of the job and the slots (ranks) on them. Plain records with the few questions asked of them.

A slot is one rank; it outlives its workers. `incarnation` is the number of its current or latest worker, so anything
that names another incarnation is stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from flashrec.core.placement import NodeRoom
from flashrec.core.types import Assignment, Report


class Node(msgspec.Struct):
    """incarnation 0: no agent has joined yet. launch_failures and process_failures: since the agent joined. request:
    the pool's grant it came with (0: from the allocation). left: given back, or taken away. link_lost: why this life
    cannot train although its agent lives. leaving: who wants it given up (cause -> reason)."""

    name: str
    preference: int
    incarnation: int = 0
    alive: bool = False
    process_failures: int = 0
    launch_failures: int = 0
    lost_because: str = ""
    request: int = 0
    left: bool = False
    link_lost: str = ""
    leaving: dict[str, str] = {}


class Slot(msgspec.Struct):
    """state: 'unplaced' (no worker), 'launched' (asked for), 'up' (seen), 'gone' (ended in an orderly way)."""

    rank: int
    node: str
    local_rank: int
    incarnation: int = 0
    state: str = "unplaced"
    joins: bool = False
    finished: bool = False
    report: Report | None = None
    formed: bool = False
    restored_v: int | None = None
    lost_because: str = ""

    @property
    def is_live(self) -> bool:
        return self.state in ("launched", "up")

    @property
    def is_survivor(self) -> bool:
        """Has a state of its own to report (a joiner that is still starting has none)."""
        return self.state == "up" and not self.joins

    def forget_generation(self) -> None:
        """A new generation begins: what was said in the old one no longer counts."""
        self.report, self.formed, self.restored_v = None, False, None


class Members:
    """All nodes and slots of a job."""

    def __init__(self, nodes: tuple[str, ...], num_active: int, ranks_per_node: int) -> None:
        self.nodes = {name: Node(name, index) for index, name in enumerate(nodes)}
        self.ranks_per_node = ranks_per_node
        self.num_active = num_active
        self.slots = [
            Slot(node * ranks_per_node + local, nodes[node], local)
            for node in range(num_active)
            for local in range(ranks_per_node)
        ]

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @property
    def is_complete(self) -> bool:
        """Some rank has passed the final vote, so all steps are done on every rank."""
        return any(slot.finished for slot in self.slots)

    def add(self, name: str, request: int) -> Node:
        """A node from the pool; last in preference. One that was here before goes on counting its lives."""
        former = self.nodes.get(name)
        incarnation = former.incarnation if former is not None else 0
        preference = former.preference if former is not None else len(self.nodes)
        self.nodes[name] = node = Node(name, preference, incarnation, request=request)
        return node

    def from_pool(self) -> Iterator[Node]:
        """Nodes that were granted and not given back."""
        return (node for node in self.nodes.values() if node.request and not node.left)

    def on_node(self, node: str) -> Iterator[Slot]:
        """Slots whose current worker lives on `node`."""
        return (slot for slot in self.slots if slot.node == node and slot.state != "unplaced")

    def live(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.is_live]

    def unplaced(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.state == "unplaced"]

    def assign(self, node: str, ranks: Mapping[int, int], generation: int, joins: bool) -> tuple[Assignment, ...]:
        """Begin the next life of `ranks` (rank -> local rank) on `node`."""
        for rank, local_rank in ranks.items():
            slot = self.slots[rank]
            slot.node, slot.local_rank, slot.state, slot.finished = node, local_rank, "launched", False
            slot.incarnation, slot.joins = slot.incarnation + 1, joins
        return tuple(
            Assignment(rank, local_rank, self.slots[rank].incarnation, generation, joins)
            for rank, local_rank in ranks.items()
        )

    def rooms(self, max_in_place: int) -> list[NodeRoom]:
        """Room on every living node that can be reached by its peers. A node where processes keep failing, or launches
        fail, or that is to leave, is not trusted."""
        rooms = []
        for node in self.nodes.values():
            if not node.alive or node.link_lost:
                continue
            taken = {slot.local_rank for slot in self.on_node(node.name)}
            free = tuple(i for i in range(self.ranks_per_node) if i not in taken)
            trusted = node.process_failures <= max_in_place and node.launch_failures == 0 and not node.leaving
            rooms.append(NodeRoom(node.name, node.preference, free, trusted))
        return rooms
