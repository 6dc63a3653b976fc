"""Hangs: which worker has stood still while its peers wait for it. Pure: time is an argument.

Training is synchronous, so a worker that hangs is soon waited for by all. Who waits and who is waited for is told by
the number of collectives that each worker has issued in each process group: the hung one has issued fewer than its
peers, or its process says nothing at all (the interpreter's lock is held, or it is stopped). A worker is *hung* when

    it has stood still for its patience             and its peers, all of them, have stood still for `SETTLE_S`
    it is behind a peer in a group, or silent       and was not seen waiting in a collective for its patience
    it is in the step loop, and not quiet           and its agent was heard just now

Patience is the longest of: `floor_s`; `factor` times a recent step; `factor` times what the fastest peer needed for the
same stretch (so that evaluations, and steps that grow, are measured by themselves). Between steps it is `between_s`,
in the first steps of a life `first_step_s` until it is known how long those take. Who hangs again where one was found
hung already gets four times as long: what is only slow comes through in the end.

If all wait in the same collective there is nobody to blame: `Stalled`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol, Union

import msgspec

from flashrec.core.limits import HangLimits

SILENT_S = 1.0  # no heartbeat of a worker for so long: it says nothing
FRESH_S = 1.5  # what an agent said longer ago than this is no ground for a verdict
SETTLE_S = 1.0  # peers have to stand still for so long, too
WARM_STEPS = 2  # first steps of a life: compilation, caches, the rebuilding of buckets
FIRST_FLOORS = 10  # first steps have so many floors at least: a replacement loads libraries on a busy node
RECENT_STEPS = 64
HIGH_PERCENTILE = 0.9
LENIENCY = 4.0
LOOP = frozenset({"idle", "step", "vote", "optimizer"})
_STATES = {
    "R": "running: it computes, or holds the interpreter's lock",
    "S": "asleep in a call that holds the interpreter's lock",
    "D": "in a system call that cannot be interrupted: a disk or a driver",
    "T": "stopped",
    "t": "stopped by a debugger",
}


class Tag(Protocol):
    """What is known of one worker, as its agent told it (`wire.messages.WorkerBeat` is one).

    where: 'init', 'idle' (between steps), 'step', 'vote', 'optimizer', 'recovery', 'done'. quiet: the reason why it
    may stand still, '' if there is none.

    collectives: issued so far, by process group. waiting: None where that cannot be seen. still_s: since anything but
    `waiting` changed; silent_s: since its last heartbeat, both on the agent's clock. process: the kernel's state
    letter of a silent worker.
    """

    @property
    def rank(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def v(self) -> int: ...
    @property
    def voted(self) -> int: ...
    @property
    def passed(self) -> int: ...
    @property
    def where(self) -> str: ...
    @property
    def quiet(self) -> str: ...
    @property
    def waiting(self) -> bool | None: ...
    @property
    def collectives(self) -> Mapping[str, int]: ...
    @property
    def still_s(self) -> float: ...
    @property
    def silent_s(self) -> float: ...
    @property
    def process(self) -> str: ...


class Hung(msgspec.Struct, frozen=True):
    """This life of this rank keeps its peers waiting."""

    rank: int
    incarnation: int
    reason: str


class Stalled(msgspec.Struct, frozen=True):
    """All ranks wait in the same collective: a message was lost, or a library is deadlocked."""

    reason: str


Finding = Union[Hung, Stalled]


class _Watched(msgspec.Struct):
    """One life of a rank. began_v: where it entered the loop, at began_at; warm: it has done its first steps."""

    tag: Tag
    changed_at: float
    heard_at: float
    waited_at: float | None = None  # when it was last seen waiting since it stands still
    ahead_at: float | None = None  # since when a peer has issued a collective that this one has not
    quiet_since: float | None = None
    began_v: int | None = None
    began_at: float = 0.0
    is_warm: bool = False
    condemned: bool = False

    def is_fresh(self, now: float) -> bool:
        return now - self.heard_at <= FRESH_S

    @property
    def is_silent(self) -> bool:
        return self.tag.silent_s >= SILENT_S

    @property
    def is_in_loop(self) -> bool:
        return self.tag.where in LOOP


class HangDetector:
    """Keeps the newest tag of each rank. Times are seconds of one monotonic clock."""

    def __init__(self, limits: HangLimits, tags_late_s: float = 0.0) -> None:
        """tags_late_s: by so much longer than a heartbeat a tag may be the newest one. Its worker may have moved
        since, so everybody gets so much more time."""
        self._limits, self._late_s = limits, tags_late_s
        self._ranks: dict[int, _Watched] = {}
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._first_s: float | None = None  # longest first steps of a life
        self._v, self._v_at = -1, None  # type: int, float | None
        self._num_steps = 0  # of which it is known how long they took
        self._was_quiet = False
        self._hung_at: dict[tuple[int, int], int] = {}  # (rank, v) -> how often it was found hung there
        self._resumed_at = 0.0
        self._stalled = False

    # ---- what is said --------------------------------------------------------------------------------------------

    def resumed(self, now: float, num_ranks: int | None = None) -> None:
        """The job goes on in a new generation: what stood still until now did so for a reason. num_ranks: those that
        there are now (None: as before); nobody waits for others."""
        self._resumed_at = now
        if num_ranks is not None:
            self._ranks = {rank: watched for rank, watched in self._ranks.items() if rank < num_ranks}
        for watched in self._ranks.values():
            watched.changed_at, watched.ahead_at, watched.waited_at = now, None, None
            watched.began_at, watched.condemned = now, False
        self._v_at, self._was_quiet, self._stalled = None, False, False

    def heard(self, tags: Iterable[Tag], now: float) -> None:
        """The newest tags of some workers have come."""
        for tag in tags:
            watched = self._ranks.get(tag.rank)
            if watched is None or tag.incarnation > watched.tag.incarnation:
                watched = self._ranks[tag.rank] = _Watched(tag, now, now)
            elif tag.incarnation < watched.tag.incarnation:
                continue
            elif _has_moved(watched.tag, tag):
                watched.ahead_at, watched.waited_at, watched.condemned = None, None, False
            self._take(watched, tag, now)

    def _take(self, watched: _Watched, tag: Tag, now: float) -> None:
        watched.heard_at, watched.changed_at = now, max(now - tag.still_s, self._resumed_at)
        if tag.waiting and tag.silent_s < SILENT_S:  # else the tag is old
            watched.waited_at = now
        if bool(tag.quiet) != bool(watched.quiet_since):
            watched.quiet_since = now if tag.quiet else None
        self._was_quiet |= bool(tag.quiet)
        watched.tag = tag
        if not watched.is_in_loop or watched.is_silent:
            return
        if watched.began_v is None:
            watched.began_v, watched.began_at = tag.v, now
        if not watched.is_warm and tag.v >= watched.began_v + WARM_STEPS:
            watched.is_warm = True
            self._first_s = max(self._first_s or 0.0, now - watched.began_at)
        if tag.v > self._v:
            self._stepped(tag.v, now)

    def _stepped(self, v: int, now: float) -> None:
        """Some rank is the first to have done step v - 1."""
        if self._v_at is not None and not self._was_quiet:
            self._recent.append((now - self._v_at) / (v - self._v))
            self._num_steps += v - self._v
        self._hung_at = {at: times for at, times in self._hung_at.items() if at[1] >= v - 1}
        self._v, self._v_at, self._was_quiet = v, now, False

    # ---- what it means -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Finding]:
        """Judge everybody. Call it a few times a second while the job trains."""
        watched = [w for w in self._ranks.values() if w.is_in_loop and w.is_fresh(now)]
        if len(watched) < 2 or len(watched) < len(self._ranks):
            return []  # nobody waits for anybody, or somebody was not heard: the judgement is not ours
        highest = _highest(watched)
        for it in watched:
            if it.ahead_at is None and _is_behind(it, highest):
                it.ahead_at = now
        hung = [it for it in watched if self._is_suspect(it, watched, highest, now)]
        others = [it for it in watched if it not in hung and not it.is_silent]
        if not hung or not others or any(now - it.changed_at < SETTLE_S + self._late_s for it in others):
            return self._stalled_all(watched, now)
        if 2 * sum(it.is_silent for it in watched) > len(watched):
            return []  # most say nothing: rather the machines than a worker
        if not any(it.waited_at is not None or it.tag.waiting is None for it in others):
            return []
        found: list[Finding] = []
        for it in hung:
            if not it.condemned:
                it.condemned = True
                at = (it.tag.rank, it.tag.v)
                self._hung_at[at] = self._hung_at.get(at, 0) + 1
                found.append(Hung(it.tag.rank, it.tag.incarnation, self._describe(it, others, highest, now)))
        return found

    def is_hung(self, rank: int, incarnation: int) -> bool:
        """True while the worker that was found hung has not moved since."""
        watched = self._ranks.get(rank)
        return watched is not None and watched.tag.incarnation == incarnation and watched.condemned

    def step_s(self) -> float | None:
        """A recent step (a high percentile), in seconds; None until `min_steps` were seen."""
        if self._num_steps < self._limits.min_steps:
            return None
        ordered = sorted(self._recent)
        return ordered[min(int(HIGH_PERCENTILE * len(ordered)), len(ordered) - 1)]

    def note_of(self, rank: int) -> str:
        """For the status: 'hung', 'quiet: …' or ''."""
        watched = self._ranks.get(rank)
        if watched is None:
            return ""
        if watched.condemned:
            return "hung"
        return f"quiet: {watched.tag.quiet}" if watched.tag.quiet else ""

    def _is_suspect(self, it: _Watched, watched: list[_Watched], highest: Mapping[str, int], now: float) -> bool:
        if not it.is_silent:
            if not _is_behind(it, highest):
                return False
            if it.tag.waiting is None and (not _is_lowest(it, watched) or any(w.tag.quiet for w in watched)):
                return False  # it may wait in another group, which cannot be seen
        if it.tag.quiet:
            return self._quiet_too_long(it, now)
        # It may hang in one collective's computation while an earlier one still waits for a slow peer.
        still_since = it.changed_at if it.is_silent else max(it.changed_at, it.waited_at or 0.0)
        return now - still_since >= self._patience_s(it, watched)

    def _quiet_too_long(self, it: _Watched, now: float) -> bool:
        limit_s = self._limits.quiet_max_s
        return limit_s > 0 and it.quiet_since is not None and now - it.quiet_since >= limit_s

    def _patience_s(self, it: _Watched, watched: list[_Watched]) -> float:
        limits, step_s = self._limits, self.step_s()
        waited_from = it.ahead_at
        if waited_from is None:
            waited_from = min(w.changed_at for w in watched if w is not it)
        patience_s = max(limits.floor_s, limits.factor * max(0.0, waited_from - it.changed_at))
        if step_s is not None:
            patience_s = max(patience_s, limits.factor * step_s)
        if it.tag.where == "idle":
            patience_s = max(patience_s, limits.between_s)
        if not it.is_warm or step_s is None:
            known = step_s is not None and self._first_s is not None
            usual_s = max(FIRST_FLOORS * limits.floor_s, limits.factor * (self._first_s or 0.0))
            first_s = usual_s if known else limits.first_step_s
            patience_s = max(patience_s, min(first_s, limits.first_step_s))
        return (patience_s + self._late_s) * LENIENCY ** self._hung_at.get((it.tag.rank, it.tag.v), 0)

    def _describe(self, it: _Watched, others: list[_Watched], highest: Mapping[str, int], now: float) -> str:
        tag, still_s = it.tag, now - it.changed_at
        place = f"between steps, before step {tag.v}" if tag.where == "idle" else f"in step {tag.v}"
        if tag.quiet:
            what = f"has been quiet ({tag.quiet}) for {now - (it.quiet_since or now):.1f} s {place}"
        elif it.is_silent:
            state = _STATES.get(tag.process, "state unknown")
            what = f"hangs {place} for {still_s:.1f} s and says nothing ({state})"
        else:
            what = f"hangs {place} for {still_s:.1f} s"
        behind = sorted(name for name, number in tag.collectives.items() if number < highest.get(name, 0))
        if behind:
            return f"{what}; {_count(others)} in collective {highest[behind[0]]} of group {behind[0]}"
        return f"{what}; {_count(others)}"

    # ---- nobody to blame -----------------------------------------------------------------------------------------

    def _stalled_all(self, watched: list[_Watched], now: float) -> list[Finding]:
        limit_s = max(self._limits.all_wait_s, self._limits.factor * (self.step_s() or self._limits.first_step_s))
        still_s = min(now - it.changed_at for it in watched)
        if self._stalled or still_s < limit_s or any(it.is_silent or it.tag.quiet for it in watched):
            return []
        if all(it.waited_at is None for it in watched) or any(it.ahead_at is not None for it in watched):
            return []
        self._stalled = True
        group = max(_highest(watched).items(), key=lambda item: item[1], default=("?", 0))
        return [
            Stalled(f"all ranks wait in collective {group[1]} of group {group[0]} for {still_s:.1f} s: nobody is late")
        ]


def _has_moved(before: Tag, after: Tag) -> bool:
    if (before.v, before.voted, before.passed, before.quiet) != (after.v, after.voted, after.passed, after.quiet):
        return True
    # a silent worker has not moved: its agent has only read where it is
    return before.collectives != after.collectives or (before.where != after.where and after.silent_s < SILENT_S)


def _highest(watched: Iterable[_Watched]) -> dict[str, int]:
    highest: dict[str, int] = {}
    for it in watched:
        for name, number in it.tag.collectives.items():
            highest[name] = max(number, highest.get(name, number))
    return highest


def _is_behind(it: _Watched, highest: Mapping[str, int]) -> bool:
    return any(number < highest[name] for name, number in it.tag.collectives.items())


def _is_lowest(it: _Watched, watched: list[_Watched]) -> bool:
    """In some group in which it is behind, nobody has issued fewer."""
    for name, number in it.tag.collectives.items():
        numbers = [w.tag.collectives[name] for w in watched if name in w.tag.collectives]
        if number == min(numbers) < max(numbers):
            return True
    return False


def _count(others: list[_Watched]) -> str:
    return "the other rank waits" if len(others) == 1 else f"{len(others)} others wait"
