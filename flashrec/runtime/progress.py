"""Where this rank stands: the step tags that beats carry and that a report states after a fence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flashrec.core.ranks import compact
from flashrec.core.types import Report
from flashrec.transport.page import WHERE, Page, pad
from flashrec.wire.messages import WorkerBeat

Seen = tuple[bool | None, dict[str, int]]


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
    page: Page | None = field(default=None, repr=False)  # 'where' and 'quiet' are written there, too
    has_tree: bool = False  # votes go over `tree`, whose operations are collectives, too
    tree_ops: tuple[int, int] = (-1, 0)  # (generation, operations begun in it)
    is_in_tree: bool = False
    look: Callable[[], Seen] = field(default=lambda: (None, {}), repr=False)  # waiting, collectives issued

    _where: str = "init"
    _quiet: str = ""

    @property
    def where(self) -> str:
        """'init', 'idle', 'step', 'vote', 'optimizer', 'recovery', 'done'"""
        return self._where

    @where.setter
    def where(self, where: str) -> None:
        self._where = where
        if (page := self.page) is not None:
            page.memory[WHERE] = pad(where)  # not through a method: this is done five times in each step

    @property
    def quiet(self) -> str:
        """Why this rank may stand still; '': no reason."""
        return self._quiet

    @quiet.setter
    def quiet(self, why: str) -> None:
        self._quiet = why
        if self.page is not None:
            self.page.write_quiet(why)

    def beat(self) -> WorkerBeat:
        waiting, collectives = self.look()
        if self.has_tree:
            generation, num_ops = self.tree_ops
            collectives = {**collectives, "vote": num_ops if generation == self.generation else 0}
            waiting = True if self.is_in_tree else waiting
        return WorkerBeat(
            rank=self.rank,
            incarnation=self.incarnation,
            v=self.v,
            voted=self.voted,
            passed=self.passed,
            where=self.where,
            quiet=self.quiet,
            waiting=waiting,
            collectives=collectives,
        )

    def report(self, replicas: tuple[int, ...]) -> Report:
        return Report(v=self.v, voted=self.voted, passed=self.passed, valid=self.valid, replicas=compact(replicas))
