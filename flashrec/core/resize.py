"""Another world size: whole replicas leave where there is no node for them, and come back when there is one.

A world size is baked into a process, so all ranks begin a new life. What they hold is put aside on their nodes first:

    all are fenced, or have paused ─► who holds the resume step puts its state aside ─► all old lives end
      ─► a new world: each rank takes what was put aside on its own node, the others get it from a replica ─► resume

Since whole replicas come and go, a rank's shard in the new world is the one that its node holds. `plan_world` says who
is where; it is asked again when something fails before the new world has resumed. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from flashrec.core.limits import Limits
from flashrec.core.membership import Estate, Members, Place
from flashrec.core.types import Plan, Report

World = tuple[Place, ...]  # by rank


class Resize(msgspec.Struct):
    """num: how often the world was resized. unit: as the ranks have said it last. estate: what was put aside, from the
    plan to the next resume. grows: all pause for a larger world. not_before: the world does not grow before; timer: the
    same, until it has gone off. refused: why the state could not be put aside (until the next resume)."""

    num: int = 0
    unit: int = 0
    estate: Estate | None = None
    grows: bool = False
    not_before: float = 0.0
    timer: float | None = None
    refused: str = ""

    def refusal(self, limits: Limits, *, grows: bool) -> str:
        """Why the world may not be resized now; '': it may."""
        if limits.shrink == "never":
            return "recovery.shrink is never"
        if self.num >= limits.max_resizes - grows:
            return f"the world was resized {self.num} times (recovery.max_resizes = {limits.max_resizes})"
        return self.refused

    def deadline(self, members: Members) -> float | None:
        """When it is time for the world to grow; None: it was, or there is nothing to wait for."""
        return self.timer if members.world_size < members.full_size else None

    def wait(self, until: float) -> None:
        """The world does not grow before."""
        self.not_before = self.timer = until

    def tick(self, now: float) -> None:
        """A deadline may have come. (What is decided hangs on `not_before`: a replay knows of no timer.)"""
        if self.timer is not None and now >= self.timer:
            self.timer = None

    def may_grow(self, members: Members, limits: Limits, now: float) -> bool:
        """There is room for another replica, and it is time. Nobody is leaving a node just now."""
        if not self.unit or members.world_size >= members.full_size or self.refusal(limits, grows=True):
            return False
        if now < self.not_before or any(node.leaving and node.alive for node in members.nodes.values()):
            return False
        num_free = sum(not any(members.on_node(name)) for name in trusted_nodes(members, limits))
        return num_free * members.ranks_per_node >= math.lcm(self.unit, members.ranks_per_node)


def trusted_nodes(members: Members, limits: Limits) -> list[str]:
    """In order of preference, whether there are ranks on them or not."""
    rooms = [room for room in members.rooms(limits.max_in_place) if room.trusted]
    return [room.name for room in sorted(rooms, key=lambda room: (room.preference, room.name))]


def estate_of(members: Members, reports: Mapping[int, Report], verdict: Plan) -> Estate | str:
    """What survivors can put aside at the resume step of `verdict`, or why they cannot go on in another world."""
    survivors = [slot for slot in members.slots if slot.is_survivor]
    said = [reports[slot.rank] for slot in survivors]
    if rigid := next((report.rigid for report in said if report.rigid), ""):
        return rigid
    units = {report.unit for report in said}
    if len(units) != 1 or 0 in units:
        return f"the ranks do not agree on how many of them hold a replica: {sorted(units)}"
    return Estate(
        generation=verdict.generation,
        step=verdict.resume_step,
        unit=units.pop(),
        nodes={slot.rank: slot.node for slot in members.slots if slot.is_live},
        holders=tuple(slot.rank for slot in survivors if slot.rank not in verdict.sources),
    )


def plan_world(estate: Estate, members: Members, limits: Limits) -> World | str:
    """The largest world, up to the one that the job began with, that what was put aside is enough for; or why there is
    none. Replicas whose nodes are all there come first; a node of one that cannot be completed fills another."""
    per_node = members.ranks_per_node
    block = math.lcm(estate.unit, per_node)  # whole replicas on whole nodes
    if members.full_size % block:
        return f"replicas of {estate.unit} ranks do not fill nodes of {per_node} ranks evenly"
    usable = {node.name for node in members.nodes.values() if node.alive and not node.link_lost}
    hosts = _hosts(estate.nodes, per_node, usable)
    hosts += [""] * (members.full_size // per_node - len(hosts))
    holders = frozenset(estate.holders)
    taken = _complete(hosts, block // per_node, [n for n in trusted_nodes(members, limits) if n not in hosts])
    world = tuple(
        Place(node, host * per_node + i if hosts[host] and host * per_node + i in holders else -1)
        for host, node in taken
        for i in range(per_node)
    )
    num_replicas = len(world) // estate.unit
    if num_replicas < limits.min_replicas:
        return f"nodes for {num_replicas} replicas are left, at least {limits.min_replicas} are wanted"
    lacking = sorted(set(range(estate.unit)) - {place.former % estate.unit for place in world if place.former >= 0})
    if lacking:
        return f"nobody is left that holds part {', '.join(map(str, lacking))} of {estate.unit} of a replica"
    return world


def _hosts(nodes: Mapping[int, str], per_node: int, usable: Collection[str]) -> list[str]:
    """For each row of `per_node` ranks the node that has all of them; '': there is none."""
    found = []
    for first in range(0, max(nodes) + 1, per_node):
        names = {nodes.get(rank, "") for rank in range(first, first + per_node)}
        name = names.pop()
        found.append(name if not names and name in usable else "")
    return found


def _complete(hosts: Sequence[str], size: int, free: Sequence[str]) -> list[tuple[int, str]]:
    """Take as many groups of `size` hosts as can be completed: (number of the host, node), in the order of hosts."""
    groups = [range(first, first + size) for first in range(0, len(hosts), size)]
    waiting = sorted(groups, key=lambda group: (sum(not hosts[host] for host in group), group[0]))
    spare, taken = list(free), []
    while waiting:
        missing = sum(not hosts[host] for host in waiting[0])
        if missing <= len(spare):
            taken += [(host, hosts[host] or spare.pop(0)) for host in waiting.pop(0)]
        else:
            spare += [hosts[host] for host in waiting.pop() if hosts[host]]
    return sorted(taken)
