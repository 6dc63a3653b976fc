"""The ladder: what is tried, one after the other, when something is lost. docs/concepts/ladder.md has it as a table.

A recovery takes the first rung that carries: nobody is replaced, a process starts again on its node, ranks move to a
spare, to a node of the pool, to a node that is not trusted. Without a place for lost ranks whole replicas leave, if the
job may shrink (`core.resize`). Where that ends there are the checkpoints: all ranks load the newest one, or the
survivors write a last one before the job ends. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from flashrec.core.effects import AnyEffect, TakeRung
from flashrec.core.limits import Limits, PoolLimits
from flashrec.core.membership import Estate, Members, Node, Place
from flashrec.core.ranks import in_words


class Rung(StrEnum):
    """From the first one tried to the last."""

    IN_PROCESS = "in process"
    IN_PLACE = "in place"
    SPARE = "spare"
    POOL = "pool"
    LAST_RESORT = "last resort"
    GROW = "grow"
    SHRINK = "shrink"
    CHECKPOINT = "checkpoint"
    DYING = "dying checkpoint"


def of_launch(
    members: Members, placed: dict[str, dict[int, int]], limits: Limits, pool: PoolLimits, num_granted: int
) -> list[AnyEffect]:
    """The rungs of a launch that is about to be asked for. placed: node -> {rank: local rank}."""
    found: dict[tuple[Rung, str], list[int]] = {}
    for name, local_ranks in placed.items():
        for rank in local_ranks:
            rung = _rung(members, members.slots[rank].node, members.nodes[name], limits)
            found.setdefault((rung, name), []).append(rank)
    return [
        TakeRung(rung, tuple(ranks), _why(rung, members, ranks, members.nodes[name], limits, pool, num_granted))
        for (rung, name), ranks in found.items()
    ]


def _rung(members: Members, former: str, node: Node, limits: Limits) -> Rung:
    if not members.is_trusted(node, limits.max_in_place):
        return Rung.LAST_RESORT
    if former == node.name:
        return Rung.IN_PLACE
    return Rung.POOL if node.request else Rung.SPARE


def _why(
    rung: Rung, members: Members, ranks: list[int], node: Node, limits: Limits, pool: PoolLimits, num_granted: int
) -> str:
    who = f"rank {in_words(ranks)}"
    if rung is Rung.IN_PLACE:
        return (
            f"{who} again on node {node.name}: process failure {node.process_failures} of {limits.max_in_place} there"
        )
    if rung is Rung.POOL:
        return f"{who} to node {node.name}: {num_granted} of {pool.max_swaps} taken from the pool"
    if rung is Rung.SPARE:
        left = sum(1 for room in members.rooms(limits.max_in_place) if room.trusted and room.name != node.name
                   and len(room.free_local_ranks) == members.ranks_per_node)  # fmt: skip
        return f"{who} to spare node {node.name}: {left} more left"
    return f"{who} on node {node.name}, which is not trusted, because there is no other"


def of_swap(members: Members, ranks: list[int], why: str) -> list[AnyEffect]:
    """The rungs of a planned swap: successors of `ranks` take over."""
    found: dict[Rung, list[int]] = {}
    for rank in ranks:
        rung = Rung.POOL if members.nodes[members.slots[rank].node].request else Rung.SPARE
        found.setdefault(rung, []).append(rank)
    return [TakeRung(rung, tuple(moved), why) for rung, moved in found.items()]


def in_process(reason: str, num_failures: int, limits: Limits) -> TakeRung:
    """Nobody is replaced: all ranks go on with new process groups."""
    text = f"nobody is replaced: {reason} (failure {num_failures} of {limits.max_without_progress} without a new step)"
    return TakeRung(Rung.IN_PROCESS, (), text)


def checkpoint(kept: Kept, reason: str, limits: Limits) -> TakeRung:
    """All ranks begin a new life from the newest checkpoint, which `kept` notes."""
    lost = kept.reached - kept.step if kept.reached >= kept.step else None
    kept.load()
    return TakeRung(
        Rung.CHECKPOINT,
        (),
        f"all ranks start again from the checkpoint of step {kept.step}, steps lost: "
        f"{'unknown' if lost is None else lost} (time {kept.num_loads} of {limits.max_loads}): {reason}",
        lost,
    )


def resized(
    rung: Rung, members: Members, world: Sequence[Place], estate: Estate, number: int, limits: Limits, reason: str
) -> TakeRung:
    """All ranks begin a new life in a world of another size, from what the former one has put aside."""
    size, full = len(world) // estate.unit, members.full_size // estate.unit
    nodes = {place.node for place in world}
    left = tuple(slot.rank for slot in members.slots if slot.node not in nodes or slot.state == "unplaced")
    verb = "grows" if rung is Rung.GROW else "shrinks"
    text = (
        f"the world {verb} from {members.world_size} to {len(world)} ranks, {size} of {full} replicas, at step "
        f"{estate.step} (resize {number} of {limits.max_resizes}): {reason}"
    )
    return TakeRung(rung, left, text)


def dying(savers: tuple[int, ...], step: int, reason: str, limits: Limits) -> TakeRung:
    """Survivors write the state of `step`, then the job ends."""
    text = f"rank {in_words(savers)} to write a checkpoint of step {step} within {limits.save_timeout_s:g} s: {reason}"
    return TakeRung(Rung.DYING, savers, text)


class Kept(msgspec.Struct):
    """What the machine knows of checkpoints. step: of the newest complete one (-1: none). loaded: the one that was
    fallen back to last, num_loads: how often in a row. reached: the furthest step that a rank has reported. can_save:
    some worker has hooks."""

    step: int = -1
    loaded: int = -1
    num_loads: int = 0
    total_loads: int = 0
    reached: int = -1
    can_save: bool = False

    def hear(self, step: int) -> None:
        """A worker has hooks, and there is a complete checkpoint of `step` (-1: none so far)."""
        self.can_save, self.step = True, max(self.step, step)

    def refusal(self, limits: Limits) -> str:
        """Why nobody can go back to a checkpoint now; '': all can."""
        if not self.can_save:
            return "the script keeps no checkpoints (session.checkpoint)"
        if self.step < 0:
            return "no checkpoint is complete yet"
        if self.step == self.loaded and self.num_loads >= limits.max_loads:
            return f"the checkpoint of step {self.step} was gone back to {self.num_loads} times (recovery.max_loads)"
        return "" if limits.max_loads else "recovery.max_loads is 0"

    def load(self) -> None:
        """All go back to the newest one."""
        self.num_loads = self.num_loads + 1 if self.step == self.loaded else 1
        self.loaded, self.total_loads = self.step, self.total_loads + 1
        self.reached = self.step
