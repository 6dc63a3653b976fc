"""What a journal says about one injected fault: when the verdict came, when training went on, and what was said in
vain. Pure, apart from the tail of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]
IsVerdict = Callable[[Line], bool]

WRONG = ("dead", "hung", "stalled")  # of a healthy node or worker; 'slow' is a remark


class JournalTail:
    """The lines of a growing journal, each read once; a torn last line is left for the next time."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """All lines so far."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self.lines
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines


def event_of(line: Line, kind: str) -> Line | None:
    """The event in a line if it is of that type."""
    event = line.get("event") or {}
    return event if line["kind"] == "event" and event.get("type") == kind else None


def is_condemned(node: str) -> IsVerdict:
    """The line that gives a node up, or its link to the fabric: the detector's verdict."""
    subjects = (f"node {node}", f"fabric link of node {node}")
    return lambda line: line["kind"] == "verdict" and line["subject"] in subjects and line["state"] == "dead"


def is_worker_lost(rank: int) -> IsVerdict:
    """The line that says that a worker is lost: found hung by the manager, or its exit as its agent told it."""

    def check(line: Line) -> bool:
        if line["kind"] == "verdict":
            return line["subject"] == f"rank {rank}" and line["state"] == "hung"
        exited = event_of(line, "WorkerExited")
        return exited is not None and exited["rank"] == rank

    return check


def is_leaving(node: str) -> IsVerdict:
    """The line that begins a planned swap of a node."""

    def check(line: Line) -> bool:
        leaving = event_of(line, "NodeLeaving")
        return leaving is not None and leaving["node"] == node

    return check


@dataclass(frozen=True)
class Sighting:
    """Seconds from the injection; None: has not come. `reason` is the verdict's own."""

    verdict_s: float | None
    resume_s: float | None
    reason: str


def since(lines: Iterable[Line], at: float) -> list[Line]:
    return [line for line in lines if line["mono"] >= at]


def sight(lines: Iterable[Line], at: float, is_verdict: IsVerdict) -> Sighting:
    """What became of a fault that was done at `at`."""
    after = since(lines, at)
    verdict = next((line for line in after if is_verdict(line)), None)
    if verdict is None:
        return Sighting(None, None, "")
    resume = next((x for x in after if x["kind"] == "phase" and x["to"] == "RUNNING"), None)
    reason = verdict.get("reason") or (verdict.get("event") or {}).get("reason", "")
    return Sighting(verdict["mono"] - at, None if resume is None else resume["mono"] - at, str(reason))


@dataclass(frozen=True)
class Alarms:
    """What was said about healthy nodes: suspicions, those taken back, and verdicts, each of which is wrong."""

    suspected: int = 0
    refuted: int = 0
    false_verdicts: tuple[str, ...] = ()

    def plus(self, other: Alarms) -> Alarms:
        return Alarms(
            self.suspected + other.suspected,
            self.refuted + other.refuted,
            self.false_verdicts + other.false_verdicts,
        )


def alarms(lines: Sequence[Line], at: float) -> Alarms:
    """Everything said from `at` on, when nothing was to be said. A recovery is as wrong as a verdict."""
    after = since(lines, at)
    verdicts = [line for line in after if line["kind"] == "verdict"]
    wrong = [f"{v['subject']} is {v['state']}: {v['reason']}" for v in verdicts if v["state"] in WRONG]
    wrong += [f"worker of rank {e['rank']}: {e['reason']}" for x in after if (e := event_of(x, "WorkerExited"))]
    if not wrong:
        wrong += [str(x["reason"]) for x in after if x["kind"] == "phase" and x["to"] == "FENCING"]
    states = [line["state"] for line in verdicts]
    return Alarms(states.count("suspect"), states.count("alive"), tuple(wrong))
