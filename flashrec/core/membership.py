"""Membership: the nodes of the job and the slots (ranks) on them. Plain records with the few questions asked of them.

A slot is one life of a rank, and `Members.slots` holds the acting one of each. In a planned swap a rank has two: the
acting one and a *successor*, which has built its model and waits; when the successor takes over, it becomes the acting
one and the other stands by as its *predecessor* until the resume. Anything that names another incarnation is stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from flashrec.core.placement import NodeRoom
from flashrec.core.types import Assignment, Report


class Node(msgspec.Struct):
    """incarnation 0: no agent has joined yet. launch_failures and process_failures: since the agent joined. request:
    the pool's grant it came with (0: from the allocation). left: given back, or taken away. link_lost: why this life
    cannot train although its agent lives. leaving: who wants it given up (cause -> reason). failed_swaps: in a row."""

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
    failed_swaps: int = 0


class Estate(msgspec.Struct, frozen=True):
    """What the ranks of a world have put aside for those of the next one. generation: in which they did, step: of which
    it is the state. unit: consecutive ranks that hold one replica. nodes: where each life was; holders: those whose
    state is there."""

    generation: int
    step: int
    unit: int
    nodes: dict[int, str]
    holders: tuple[int, ...]


class Place(msgspec.Struct, frozen=True):
    """Where a rank of a new world is to be. former: the rank of the former world whose state is there; -1: none is."""

    node: str
    former: int


class Slot(msgspec.Struct):
    """state: 'unplaced' (no worker), 'launched' (asked for), 'up' (seen), 'gone' (ended in an orderly way). num_lives:
    incarnations of this rank that were given out so far (kept by the acting life)."""

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
    num_lives: int = 0
    successor: Slot | None = None
    predecessor: Slot | None = None

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
        self._finished: set[int] = set()  # ranks whose acting life has passed the final vote
        self.has_launched = False  # some rank has had a worker, or was to have one

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @property
    def full_size(self) -> int:
        """The world size that the job began with."""
        return self.num_active * self.ranks_per_node

    @property
    def is_complete(self) -> bool:
        """Some rank has passed the final vote, so all steps are done on every rank."""
        return bool(self._finished)

    def finish(self, rank: int) -> None:
        """The acting life of this rank has passed the final vote."""
        self.slots[rank].finished = True
        self._finished.add(rank)

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

    def lives(self) -> Iterator[Slot]:
        """Every life of every rank: those that act, successors, and predecessors that stand by."""
        for slot in self.slots:
            yield slot
            if slot.successor is not None:
                yield slot.successor
            if slot.predecessor is not None:
                yield slot.predecessor

    def life(self, rank: int, incarnation: int) -> Slot | None:
        """The living life with this number."""
        if not 0 <= rank < len(self.slots):
            return None
        slot = self.slots[rank]
        if slot.incarnation == incarnation and slot.is_live:
            return slot  # as good as always
        lives = (slot.successor, slot.predecessor)
        return next((life for life in lives if life and life.is_live and life.incarnation == incarnation), None)

    def acts(self, life: Slot) -> bool:
        """False: a successor or a predecessor."""
        return self.slots[life.rank] is life

    def acting(self, rank: int, incarnation: int) -> Slot | None:
        """The living life with this number, if it is the one that acts for its rank."""
        life = self.life(rank, incarnation)
        return life if life is not None and self.acts(life) else None

    def successors(self) -> list[Slot]:
        return [slot.successor for slot in self.slots if slot.successor is not None]

    def on_node(self, node: str) -> Iterator[Slot]:
        """Lives whose worker is on `node`."""
        return (life for life in self.lives() if life.node == node and life.state != "unplaced")

    def by_node(self) -> dict[str, list[Slot]]:
        """`on_node` of every node that has any, in one go."""
        found: dict[str, list[Slot]] = {}
        for life in self.lives():
            if life.state != "unplaced":
                found.setdefault(life.node, []).append(life)
        return found

    def unplaced(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.state == "unplaced"]

    def assign(self, node: str, ranks: Mapping[int, int], generation: int, joins: bool) -> tuple[Assignment, ...]:
        """Begin the next life of `ranks` (rank -> local rank) on `node`."""
        self.has_launched = True
        for rank, local_rank in ranks.items():
            slot = self.slots[rank]
            self._finished.discard(rank)
            slot.node, slot.local_rank, slot.state, slot.finished = node, local_rank, "launched", False
            slot.num_lives += 1
            slot.incarnation, slot.joins = slot.num_lives, joins
        return tuple(
            Assignment(rank, local_rank, self.slots[rank].incarnation, generation, joins, self.world_size)
            for rank, local_rank in ranks.items()
        )

    def assign_successors(self, node: str, ranks: Mapping[int, int], generation: int) -> tuple[Assignment, ...]:
        """Begin a second life of `ranks` (rank -> local rank) on `node`, beside the one that trains."""
        tasks = []
        for rank, local_rank in ranks.items():
            slot = self.slots[rank]
            slot.num_lives += 1
            slot.successor = Slot(rank, node, local_rank, slot.num_lives, "launched", joins=True)
            tasks.append(Assignment(rank, local_rank, slot.num_lives, generation, True, self.world_size))
        return tuple(tasks)

    def begin_world(self, world: Sequence[Place], estate: Estate, generation: int) -> dict[str, tuple[Assignment, ...]]:
        """The ranks of a new world in place of the former ones, and where each is to begin its life. Incarnations go on
        from the highest one, so that no life is taken for one of the same rank in a former world."""
        num_lives = max(slot.num_lives for slot in self.slots)
        self.slots = [
            Slot(rank, place.node, rank % self.ranks_per_node, num_lives=num_lives) for rank, place in enumerate(world)
        ]
        placement: dict[str, tuple[Assignment, ...]] = {}
        for rank, place in enumerate(world):
            (task,) = self.assign(place.node, {rank: rank % self.ranks_per_node}, generation, joins=False)
            task = msgspec.structs.replace(task, resized=estate.generation, former=place.former)
            placement[place.node] = (*placement.get(place.node, ()), task)
        return placement

    def hand_over(self, slot: Slot) -> None:
        """The successor acts from now on; its predecessor stands by while it lives."""
        successor = slot.successor
        assert successor is not None
        successor.num_lives, slot.successor = slot.num_lives, None
        successor.predecessor = slot if slot.is_live else None
        self.slots[slot.rank] = successor
        self._finished.discard(slot.rank)

    def take_back(self, slot: Slot) -> None:
        """The predecessor of `slot` acts again."""
        former = slot.predecessor
        assert former is not None
        former.num_lives, slot.predecessor = slot.num_lives, None
        self.slots[slot.rank] = former
        if former.finished:
            self._finished.add(slot.rank)

    def rooms(self, max_in_place: int) -> list[NodeRoom]:
        """Room on every living node that can be reached by its peers. A node where processes keep failing, or launches
        fail, or that is to leave, is not trusted."""
        rooms, lives = [], self.by_node()
        for node in self.nodes.values():
            if not node.alive or node.link_lost:
                continue
            taken = {slot.local_rank for slot in lives.get(node.name, ())}
            free = tuple(i for i in range(self.ranks_per_node) if i not in taken)
            rooms.append(NodeRoom(node.name, node.preference, free, self.is_trusted(node, max_in_place)))
        return rooms

    @staticmethod
    def is_trusted(node: Node, max_in_place: int) -> bool:
        """Nothing speaks against new workers there."""
        return node.process_failures <= max_in_place and node.launch_failures == 0 and not node.leaving
