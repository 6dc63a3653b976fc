"""Journals written by hand, for the tests of the report: a small language of moments."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

BOOT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def wall(mono: float) -> str:
    """Wall time at `mono` seconds of the manager's clock."""
    return (BOOT + timedelta(seconds=mono)).isoformat(timespec="microseconds")


class Writer:
    """Collects lines as the manager writes them; `content` is the file."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.generation = 1

    def line(self, mono: float, kind: str, **fields: Any) -> None:
        self.lines.append({"seq": len(self.lines) + 1, "mono": mono, "wall": wall(mono), "kind": kind, **fields})

    def event(self, mono: float, type_: str, **fields: Any) -> None:
        self.line(mono, "event", generation=self.generation, phase="?", event={"type": type_, **fields})

    def effect(self, mono: float, type_: str, **fields: Any) -> None:
        self.line(mono, "effect", generation=self.generation, effect={"type": type_, **fields})

    def move(self, mono: float, before: str, after: str, reason: str = "") -> None:
        if after == "FENCING":
            self.generation += 1
        fields = {"from": before, "to": after}
        self.line(mono, "phase", generation=self.generation, reason=reason, **fields)

    def report(self, mono: float, rank: int, v: int, valid: bool = True, **fields: Any) -> None:
        report = {"v": v, "voted": v, "passed": v - 1, "valid": valid, "replicas": [0, 1]}
        self.event(mono, "WorkerReported", rank=rank, generation=self.generation, report=report | fields)

    def launch(self, mono: float, node: str, *ranks: int) -> None:
        tasks = [{"rank": rank, "local_rank": 0, "incarnation": 2, "joins": True} for rank in ranks]
        self.effect(mono, "LaunchWorkers", placement={node: tasks}, reason="lost")

    def plan(self, mono: float, resume_step: int) -> None:
        plan = {"generation": self.generation, "resume_step": resume_step, "roll_forward": [], "sources": {}}
        self.effect(mono, "PublishPlan", plan=plan)

    def start(self) -> Writer:
        """A job of two ranks that begins to train at 3.0."""
        self.line(1.0, "note", what="job started", job_id=4711)
        self.event(1.1, "JobStarted", nodes=["n1", "n2", "n3"], num_active=2, ranks_per_node=1)
        self.move(2.5, "PLACING", "FORMING")
        self.move(2.8, "FORMING", "RESTORING")
        self.move(3.0, "RESTORING", "RUNNING")
        return self

    def node_dies(self, mono: float) -> Writer:
        """Rank 0's node n1 is found dead at `mono`, rank 1 is in step 7, n3 takes over; up to the first commit."""
        self.line(
            mono - 1.0, "verdict", subject="node n1", state="suspect", reason="silent", generation=self.generation
        )
        self.line(
            mono, "verdict", subject="node n1", state="dead", reason="silent for 2.0 s", generation=self.generation
        )
        self.event(mono, "NodeCondemned", node="n1", incarnation=1, reason="silent for 2.0 s")
        self.move(mono, "RUNNING", "FENCING", "node n1 silent for 2.0 s")
        self.launch(mono + 0.01, "n3", 0)
        self.report(mono + 0.2, 1, 7)
        self.move(mono + 0.2, "FENCING", "PLACING")
        self.report(mono + 2.2, 0, 0, valid=False)
        self.plan(mono + 2.2, 7)
        self.move(mono + 2.2, "PLACING", "FORMING")
        return self.forms_and_resumes(mono + 2.2)

    def forms_and_resumes(self, mono: float) -> Writer:
        self.move(mono + 0.1, "FORMING", "RESTORING")
        for rank in (1, 0):
            moved = 0 if rank else 5_000_000
            self.event(
                mono + 0.4 - rank / 10, "WorkerRestored", rank=rank, generation=self.generation, v=7, moved_bytes=moved
            )
        self.move(mono + 0.4, "RESTORING", "RUNNING", "all restored")
        for rank in (0, 1):
            self.event(mono + 0.5 + rank / 10, "WorkerCommitted", rank=rank, generation=self.generation, v=8)
        return self

    @property
    def content(self) -> bytes:
        return "".join(json.dumps(line) + "\n" for line in self.lines).encode()


def fault(mono: float, **fields: Any) -> bytes:
    """A line of faults.jsonl at `mono`."""
    known = {"id": "cut", "kind": "request", "place": "in-collective", "rank": 0, "node": "n1", "step": 7}
    return json.dumps(known | {"mono": mono, "wall": wall(mono)} | fields).encode() + b"\n"
