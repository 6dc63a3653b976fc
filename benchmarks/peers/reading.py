"""What logs of steps say about one fault. Pure, apart from the tails of the files.

A *new* step is one that nobody had finished when the job was hit. The step in which it was hit, if it was never
finished, is no step done again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.detection.reading import JournalTail


class StepLine(msgspec.Struct, frozen=True):
    """A step that a rank has finished; began, at: time.monotonic()."""

    step: int
    rank: int
    began: float
    at: float
    loss: str
    pid: int
    node: str


class Recovery(msgspec.Struct, frozen=True):
    """Seconds from the fault. resume_s: to the end of the first step, new or not, that was begun after it; new_s: to
    the end of the first new step on any rank; whole_s: on all ranks. None: it did not come. redone: steps finished
    before and done again."""

    resume_s: float | None
    new_s: float | None
    whole_s: float | None
    redone: int | None


class StepLogs:
    """All logs in a folder, as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, JournalTail] = {}

    def read(self) -> list[StepLine]:
        for path in self._folder.glob("steps-*.jsonl"):
            self._tails.setdefault(path, JournalTail(path))
        return [msgspec.convert(line, StepLine) for each in self._tails.values() for line in each.read()]


def finals(folder: Path) -> dict[str, str]:
    """Name of the file to digest, of each process that has finished."""
    return {path.name: json.loads(path.read_text())["digest"] for path in sorted(folder.glob("final-*.json"))}


def recovery(lines: Sequence[StepLine], fault_at: float, num_ranks: int) -> Recovery:
    """What became of a fault at `fault_at`. A rank that finishes the step in which it was when another one was hit, or
    begins the next one and waits there, has not gone on."""
    before = [line for line in lines if line.began <= fault_at]
    after = sorted((line for line in lines if line.began > fault_at), key=lambda line: line.at)
    if not before or not after:
        return Recovery(None, None, None, None)
    last = max(line.step for line in before)
    new = [line for line in after if line.step > last]
    whole = whole_at(new, num_ranks)
    return Recovery(
        resume_s=after[0].at - fault_at,
        new_s=new[0].at - fault_at if new else None,
        whole_s=None if whole is None else whole - fault_at,
        redone=max(0, last + 1 - min(line.step for line in after)),
    )


def whole_at(lines: Sequence[StepLine], num_ranks: int) -> float | None:
    """When the first step had been finished by all ranks."""
    done: dict[int, dict[int, float]] = {}
    for line in lines:
        done.setdefault(line.step, {})[line.rank] = line.at
    ends = [max(ranks.values()) for ranks in done.values() if len(ranks) >= num_ranks]
    return min(ends, default=None)


def is_at_step(lines: Sequence[StepLine], step: int, num_ranks: int) -> bool:
    return len({line.rank for line in lines if line.step == step}) >= num_ranks
