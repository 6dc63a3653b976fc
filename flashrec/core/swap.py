"""The planned swap: ranks leave a node that is drained, sick or unwanted, at a step boundary, and no step is lost.

    a node is to leave ─► room elsewhere ─► successors start, build their model, report      training goes on
      ─► boundary fence: a vote tells every rank that all pause after this step              training goes on
      ─► everybody reports, successors take over, are restored, resume                       the pause
      ─► predecessors are killed, the node is retired (or goes back to the pool)

Before the pause nothing that happens to a successor touches the training. A failure during the pause is an ordinary
one: the former lives act again, successors that had taken over are dropped. Pure; the machine owns the phases.
"""

from __future__ import annotations

import msgspec

from flashrec.core.effects import AnyEffect, LaunchWorkers, RetireNode, Tell
from flashrec.core.limits import Limits
from flashrec.core.membership import Members, Node, Slot
from flashrec.core.placement import place
from flashrec.core.pool import PoolTier
from flashrec.core.types import Assignment

MAX_FAILED = 3  # pauses that were cut by a failure; after these the node stays in use
_KEEPS_AGENT = frozenset({"health"})  # whoever said so asks the agent whether the node is well again


class PlannedSwap(msgspec.Struct):
    """pausing: the boundary fence is announced (because of `why`) and its generation has not resumed. ready_by:
    successors that have not reported by then are dropped. wants_room: some leaving node waits for a spare. retry_at:
    ask the pool again. told: leaving nodes whose lack of a spare was said."""

    pausing: bool = False
    why: str = ""
    wants_room: bool = False
    ready_by: float | None = None
    retry_at: float | None = None
    told: set[str] = set()

    def deadline(self, pool: PoolTier) -> float | None:
        """When `late` wants to be called, while training goes on."""
        if self.pausing:
            return None
        waits = [self.ready_by, self.retry_at, pool.deadline if pool.is_waiting else None]
        return min((wait for wait in waits if wait is not None), default=None)

    def begin(self, members: Members) -> None:
        """The boundary fence is announced."""
        self.pause(self.reason(members))

    def pause(self, why: str) -> None:
        """All ranks are to pause at a step boundary."""
        self.pausing, self.ready_by, self.why = True, None, why

    def reason(self, members: Members) -> str:
        """What is being done, in words."""
        ranks = [slot.rank for slot in members.slots if slot.successor or slot.predecessor]
        nodes = dict.fromkeys(
            (slot.predecessor or slot).node for slot in members.slots if slot.successor or slot.predecessor
        )
        why = "; ".join(f"node {name}: {_why(members.nodes[name])}" for name in nodes)
        return f"rank {', '.join(map(str, ranks))} move at a step boundary ({why})"

    def seek(self, members: Members, pool: PoolTier, limits: Limits, generation: int, now: float) -> list[AnyEffect]:
        """Start successors of the ranks on leaving nodes wherever there is trusted room; else ask the pool, else say
        that the node stays in use. A node is moved as a whole or not at all."""
        out: list[AnyEffect] = []
        placement: dict[str, tuple[Assignment, ...]] = {}
        homeless: list[Node] = []
        num_homeless = 0
        for node in _to_empty(members):
            ranks = {slot.rank: node.name for slot in _moving(members, node)}
            if not ranks:
                continue
            rooms = [room for room in members.rooms(limits.max_in_place) if room.trusted]
            placed, shortage = place(ranks, rooms)
            if shortage is not None:
                homeless.append(node)
                num_homeless += len(ranks)
                continue
            self.told.discard(node.name)
            for target, local_ranks in placed.items():
                tasks = members.assign_successors(target, local_ranks, generation)
                placement[target] = placement.get(target, ()) + tasks
        if placement:
            self.ready_by = now + limits.launch_timeout_s
            out.append(LaunchWorkers(placement, self.reason(members)))
        return out + self._ask(homeless, num_homeless, members, pool, limits, now)

    def _ask(
        self, homeless: list[Node], num_ranks: int, members: Members, pool: PoolTier, limits: Limits, now: float
    ) -> list[AnyEffect]:
        self.wants_room = bool(homeless)
        if not homeless:
            self.retry_at = None
            return pool.settle("no node is needed") if pool.is_waiting or pool.is_closed else []
        why = "; ".join(f"node {node.name}: {_why(node)}" for node in homeless)
        out = pool.ask(-(-num_ranks // members.ranks_per_node), why, now)
        if pool.is_waiting:
            return out
        if pool.limits.max_swaps and self.retry_at is None:
            self.retry_at = now + limits.swap_retry_s
        said = f" ({pool.said})" if pool.said else ""
        for node in homeless:
            if node.name not in self.told:
                self.told.add(node.name)
                out.append(Tell(f"no spare: node {node.name} stays in use until one comes: {_why(node)}{said}"))
        return out

    def is_ready(self, members: Members) -> bool:
        """Successors are there and all of them have reported."""
        successors = members.successors()
        return bool(successors) and all(successor.report for successor in successors)

    def late(self, members: Members, pool: PoolTier, limits: Limits, now: float) -> list[Slot]:
        """A deadline may have come: successors to be dropped."""
        if self.retry_at is not None and now >= self.retry_at:
            self.retry_at = None
            pool.settle("the next try begins")
        if self.ready_by is None or now < self.ready_by:
            return []
        self.ready_by = None
        mute = [successor for successor in members.successors() if successor.report is None]
        for name in {successor.node for successor in mute}:
            members.nodes[name].launch_failures += 1
        return mute

    def unwanted(self, members: Members) -> list[Slot]:
        """Successors whose predecessor may stay after all."""
        return [s.successor for s in members.slots if s.successor is not None and not members.nodes[s.node].leaving]

    def cut(self, members: Members) -> list[AnyEffect]:
        """A failure came before the pause was over: it does not count for nodes that are lost by now."""
        self.pausing, out = False, list[AnyEffect]()
        nodes = {(slot.predecessor or slot).node for slot in members.slots if slot.successor or slot.predecessor}
        for node in (members.nodes[name] for name in sorted(nodes)):
            node.failed_swaps += 1
            if node.failed_swaps == MAX_FAILED and node.alive:
                out.append(Tell(f"node {node.name} stays in use: its planned swap was cut {MAX_FAILED} times"))
        return out

    def retire(self, members: Members) -> list[AnyEffect]:
        """Leaving nodes without ranks need no agent, unless it says whether the node is well again."""
        out: list[AnyEffect] = []
        for node in members.nodes.values():
            if node.alive and set(node.leaving) - _KEEPS_AGENT and not any(members.on_node(node.name)):
                node.alive, node.lost_because = False, _why(node)
                out.append(RetireNode(node.name, _why(node)))
        return out


def _to_empty(members: Members) -> list[Node]:
    leaving = [
        node for node in members.nodes.values() if node.leaving and node.alive and node.failed_swaps < MAX_FAILED
    ]
    return sorted(leaving, key=lambda node: node.preference)


def _moving(members: Members, node: Node) -> list[Slot]:
    return [life for life in members.on_node(node.name) if members.acts(life) and life.successor is None]


def _why(node: Node) -> str:
    return "; ".join(node.leaving.values()) or node.lost_because or "asked for"
