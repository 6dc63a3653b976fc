"""Where this rank stands: the step tags that beats carry and that a report states after a fence."""

from __future__ import annotations

from dataclasses import dataclass

from flashrec.core.types import Report
from flashrec.wire.messages import WorkerBeat


@dataclass
class Progress:
    """Written by the main thread only; the beat thread reads single fields, which is safe."""

    rank: int
    incarnation: int
    generation: int  # the one our groups belong to
    v: int = 0  # optimizer steps applied to a valid state; -1: no state yet
    voted: int = -1
    passed: int = -1
    valid: bool = True
    reported: int = -1  # newest generation for which this rank has reported
    where: str = "init"  # 'init', 'step', 'vote', 'optimizer', 'recovery', 'done'

    def beat(self) -> WorkerBeat:
        return WorkerBeat(
            rank=self.rank,
            incarnation=self.incarnation,
            v=self.v,
            voted=self.voted,
            passed=self.passed,
            where=self.where,
        )

    def report(self, replicas: tuple[int, ...]) -> Report:
        return Report(v=self.v, voted=self.voted, passed=self.passed, valid=self.valid, replicas=replicas)
