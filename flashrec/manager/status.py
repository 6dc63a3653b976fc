"""`JOBDIR/status.json`: what `flashrec status` shows of a running job, rewritten atomically."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from flashrec.core.detection import Detector
from flashrec.core.machine import Machine
from flashrec.wire.messages import WorkerBeat


async def write_status(job_dir: Path, take: Callable[[], dict[str, Any]]) -> float:
    """Write what `take` gives (in a thread: the disk may be slow); a failing disk is ignored (the journal complains).
    Returns the seconds of CPU that it took."""
    began = time.thread_time()
    status = take()
    took_s = time.thread_time() - began
    return took_s + await asyncio.to_thread(_replace, job_dir / "status.json", status)


def _replace(path: Path, status: dict[str, Any]) -> float:
    began = time.thread_time()
    data = msgspec.json.format(msgspec.json.encode(status), indent=1)
    temporary = path.with_suffix(".json.new")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return time.thread_time() - began


def snapshot(
    job_id: int | None, machine: Machine, detector: Detector, tags: dict[int, WorkerBeat],
    companion_of: Callable[[str], int | None] | None = None, note_of: Callable[[int], str] = lambda _: "",
    fabric_of: Callable[[str], str] | None = None, parked: Mapping[str, int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Plain data: phase, generation, nodes with their state, ranks with their node and newest step tag. With a pool:
    the companion job that each node came with. note_of: what there is to say about a rank, '' if nothing. fabric_of:
    what is known of a node's fabric link, where links are watched. parked: node -> how many parked processes are ready,
    where any are wanted."""
    ranks: list[dict[str, Any]] = []
    for slot in machine.members.slots:
        tag = tags.get(slot.rank)
        ranks.append(
            {
                "rank": slot.rank, "node": slot.node, "incarnation": slot.incarnation, "state": slot.state,
                "step": tag.v if tag and tag.incarnation == slot.incarnation else None,
                "where": tag.where if tag and tag.incarnation == slot.incarnation else None,
                "note": note_of(slot.rank),
            }
        )  # fmt: skip
    lives = machine.members.by_node()
    nodes = [
        {
            "node": node.name, "state": detector.state_of(node.name), "incarnation": node.incarnation,
            "ranks": [slot.rank for slot in lives.get(node.name, ())], "lost_because": node.lost_because,
        }
        for node in machine.members.nodes.values()
        if not node.left
    ]  # fmt: skip
    if fabric_of is not None:
        nodes = [node | {"fabric": fabric_of(str(node["node"]))} for node in nodes]
    if parked is not None:
        nodes = [node | {"parked": parked.get(str(node["node"]), 0)} for node in nodes]
    if companion_of is not None:
        nodes = [node | {"companion_job": companion_of(str(node["node"]))} for node in nodes]
    return {
        "job_id": job_id,
        "pid": os.getpid(),
        "wall": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "phase": machine.phase,
        "generation": machine.generation,
        "step": min((r["step"] for r in ranks if r["step"] is not None), default=None),
        "exit_code": machine.exit_code,
        "stop_reason": machine.stop_reason,
        **({"pool": _pool(machine)} if companion_of is not None else {}),
        "nodes": nodes,
        "ranks": ranks,
    }


def _pool(machine: Machine) -> str:
    """In words: what is asked for, and what the pool said last."""
    pool = machine.pool
    waiting = f"; waiting for {len(pool.open)} more" if pool.open else ""
    return f"{pool.num_granted} taken so far{waiting}{f'; {pool.said}' if pool.said else ''}"
