"""Both groups live in the same processes and take turns, so whatever else the machine does hits both.

`ours` is the script's own group, made and connected by an engine; `plain` is made by torch's own function, past ours.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn

import flashrec


def main(out: str, store: str, blocks: int, calls: dict[str, int]) -> None:
    """calls: size in bytes -> all-reduces of a block. Half of the blocks come after a recovery."""
    torch.set_num_threads(1)
    flashrec.init()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([member]) for member in range(size)][rank]
    torch_helper = c10d._new_process_group_helper.__wrapped__  # type: ignore[attr-defined]
    files = dist.FileStore(store, size)

    def plain(members: list[int], name: str) -> Any:
        store = dist.PrefixStore(name, files)
        group_rank = members.index(rank)
        group, _ = torch_helper(
            len(members), group_rank, members, dist.Backend("gloo"), store, c10d.GroupName(name),
            timeout=timedelta(minutes=5),
        )  # fmt: skip
        c10d._world.pg_group_ranks[group] = {member: i for i, member in enumerate(members)}
        return group

    pairs = {
        size: {"ours": dist.group.WORLD, "plain": plain(list(range(size)), "plain")},
        1: {"ours": alone, "plain": plain([rank], f"alone{rank}")},
    }
    model = nn.Linear(1, 1)
    session = flashrec.Session(model, torch.optim.SGD(model.parameters(), lr=0.0), replicas=range(size))
    found: list[dict[str, Any]] = []
    for step in session.steps(2):  # between the two, a fence
        with step:
            for ranks, pair in pairs.items():
                for num_bytes, num_calls in calls.items():
                    found += _measure(pair, ranks, int(num_bytes), num_calls, blocks // 2, recovered=bool(step))
        if step == 0:
            (Path(out).parent / f"measured{rank}").touch()
            while not (Path(out).parent / "fenced").exists():
                time.sleep(0.01)
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # groups that torch has made past us are no concern of ours


def _measure(
    pair: dict[str, Any], ranks: int, num_bytes: int, num_calls: int, blocks: int, *, recovered: bool
) -> list[dict[str, Any]]:
    value = torch.ones(num_bytes // 4)
    found = []
    for block in range(blocks + 1):  # the first one warms up
        row: dict[str, Any] = {"ranks": ranks, "bytes": num_bytes, "recovered": recovered}
        for name in sorted(pair, reverse=bool(block % 2)):
            group, times = pair[name], []
            dist.all_reduce(value, group=group)
            for _ in range(num_calls):
                began = time.perf_counter()
                dist.all_reduce(value, group=group)
                times.append(time.perf_counter() - began)
            row[name] = 1e6 * sorted(times)[num_calls // 2]
        if block:
            found.append(row)
    return found
