"""Placement: on which node does each lost rank get its next life.

A rank whose process failed goes back to its own node while that node is alive and trusted; the ranks of a lost node
move together to the first spare that has room for all of them, in the order of preference that the job started with
(the batch host is last). Only if no single node has room are they split. A node that is not trusted (launches or
processes keep failing there) is the last resort. Pure: nodes in, assignments or a shortage out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec


class NodeRoom(msgspec.Struct, frozen=True):
    """What placement needs to know of a usable node. trusted: nothing speaks against new workers there."""

    name: str
    preference: int
    free_local_ranks: tuple[int, ...]
    trusted: bool


class Shortage(msgspec.Struct, frozen=True):
    """These ranks have no node."""

    ranks: tuple[int, ...]


def place(lost: Mapping[int, str], rooms: Iterable[NodeRoom]) -> tuple[dict[str, dict[int, int]], Shortage | None]:
    """lost: rank -> node of its last life. Return (node -> {rank: local rank}, shortage if any rank has no node)."""
    known = sorted(rooms, key=lambda room: (not room.trusted, room.preference, room.name))
    free = {room.name: list(room.free_local_ranks) for room in known}
    order = [room.name for room in known if room.free_local_ranks]
    trusted = {room.name for room in known if room.trusted}
    placed: dict[str, dict[int, int]] = {}
    homeless: list[int] = []
    groups: dict[str, list[int]] = {}
    for rank in sorted(lost):
        groups.setdefault(lost[rank], []).append(rank)
    for home, ranks in groups.items():
        node = _first_with_room(ranks, home if home in trusted else "", order, free)
        for rank in ranks:
            target = node or next((name for name in order if free[name]), None)
            if target is None:
                homeless.append(rank)
                continue
            placed.setdefault(target, {})[rank] = free[target].pop(0)
    return placed, Shortage(tuple(homeless)) if homeless else None


def _first_with_room(
    ranks: Sequence[int], home: str, order: Sequence[str], free: Mapping[str, list[int]]
) -> str | None:
    if len(free.get(home, ())) >= len(ranks):
        return home
    return next((name for name in order if len(free[name]) >= len(ranks)), None)
