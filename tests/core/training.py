"""A training that exists only as tags: ranks compute, issue collectives and wait for each other, in simulated time.

One step of one rank: between (where 'idle'), compute (where 'step'), collective, collective (where 'vote'), and again.
A `Pause` prolongs one stretch of one rank in one step. Heartbeats reach the detector every `BEAT_S`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from flashrec.core.hangs import HangDetector, Hung, Stalled
from flashrec.core.limits import HangLimits
from flashrec.wire.messages import WorkerBeat

BEAT_S, TICK_S = 0.25, 0.25


@dataclass
class Pause:
    """Rank `rank` needs `seconds` more in `step`, at `where` ('idle', 'step', 'vote': inside the collective there)."""

    rank: int
    step: int
    seconds: float = math.inf
    where: str = "step"
    quiet: str = ""
    silent: str = ""  # the kernel's state letter of a process that says nothing meanwhile


@dataclass
class Rank:
    number: int
    incarnation: int = 1
    v: int = 0
    voted: int = -1
    passed: int = -1
    where: str = "idle"
    issued: int = 0
    waits: bool = False
    busy_until: float = 0.0
    pause: Pause | None = None
    told: WorkerBeat | None = None  # the last that its agent heard
    heard_at: float = 0.0
    changed_at: float = 0.0

    def tag(self, sees_waiting: bool) -> WorkerBeat:
        waiting = self.waits if sees_waiting else None
        quiet = self.pause.quiet if self.pause else ""
        return WorkerBeat(
            self.number, self.incarnation, self.v, self.voted, self.passed, self.where, quiet, waiting,
            {"0": self.issued},
        )  # fmt: skip


@dataclass
class Training:
    """`run(seconds)` returns the findings with the time at which they fell."""

    world: int = 4
    step_s: float = 1.0
    between_s: float = 0.0
    pauses: list[Pause] = field(default_factory=list)
    paces: dict[int, float] = field(default_factory=dict)  # rank -> how many times as long it computes
    limits: HangLimits = field(default_factory=HangLimits)
    sees_waiting: bool = True
    lost_collective: int | None = None  # this one never ends
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.detector = HangDetector(self.limits)
        self.ranks = [Rank(number, busy_until=self.now) for number in range(self.world)]
        self.began_at: dict[tuple[int, int], float] = {}  # (rank, step) -> when its pause began
        self.deaf: set[int] = set()  # ranks whose agent is not heard
        self.done: list[tuple[float, object]] = []
        self._next_beat = self._next_tick = self.now
        self.detector.resumed(self.now)

    def run(self, seconds: float, until: object = None) -> list[tuple[float, Hung | Stalled]]:
        """Simulate; stops early when something was found and `until` is 'found'."""
        found: list[tuple[float, Hung | Stalled]] = []
        end = self.now + seconds
        while self.now < end and not (until == "found" and found):
            self.now = min([self._next_beat, self._next_tick, *self._busy_ends()])
            while sum(self._advance(rank) for rank in self.ranks):
                pass
            if self.now >= self._next_beat:
                self._next_beat += BEAT_S
                self.beat()
            if self.now >= self._next_tick:
                self._next_tick += TICK_S
                found += [(self.now, finding) for finding in self.detector.tick(self.now)]
        return found

    def beat(self) -> None:
        for rank in self.ranks:
            is_silent = bool(rank.pause and rank.pause.silent)
            tag = rank.tag(self.sees_waiting)
            if not is_silent:
                if rank.told is None or _said(rank.told) != _said(tag):
                    rank.changed_at = self.now
                rank.told, rank.heard_at = tag, self.now
            if rank.told is None or rank.number in self.deaf:
                continue
            silent_s = self.now - rank.heard_at
            process = rank.pause.silent if rank.pause and silent_s >= 1.0 else ""
            still_s = self.now - rank.changed_at
            told = msgspec.structs.replace(rank.told, still_s=still_s, silent_s=silent_s, process=process)
            if silent_s >= 1.0:  # the agent reads where it is
                told = msgspec.structs.replace(told, where=rank.where, quiet=tag.quiet)
            self.detector.heard([told], self.now)

    def _busy_ends(self) -> list[float]:
        return [rank.busy_until for rank in self.ranks if not rank.waits and rank.busy_until > self.now]

    def _advance(self, rank: Rank) -> bool:
        """True when it went on to its next stretch."""
        if self.now < rank.busy_until:
            return False
        if rank.pause is not None:
            rank.pause = None
        if rank.waits:
            if rank.issued == self.lost_collective or min(other.issued for other in self.ranks) < rank.issued:
                return False
            rank.waits = False
            if rank.where == "vote":
                rank.v, rank.passed, rank.where = rank.v + 1, rank.v, "idle"
                self._stay(rank, self.between_s, "idle")
            else:
                rank.where, rank.voted = "vote", rank.v
                if not self._stay(rank, 0.0, "vote"):
                    rank.issued, rank.waits = rank.issued + 1, True
        elif rank.where == "idle":
            rank.where = "step"
            self._stay(rank, self.step_s * self.paces.get(rank.number, 1.0), "step")
        else:
            rank.issued, rank.waits = rank.issued + 1, True
        return True

    def _stay(self, rank: Rank, seconds: float, where: str) -> bool:
        rank.busy_until = self.now + seconds
        for pause in self.pauses:
            if (pause.rank, pause.step, pause.where) == (rank.number, rank.v, where):
                self.began_at[rank.number, rank.v] = self.now
                rank.busy_until += pause.seconds
                rank.pause = pause
                return True
        return False


def _said(tag: WorkerBeat) -> tuple[object, ...]:
    return tag.v, tag.voted, tag.passed, tag.where, tag.quiet, tag.collectives
