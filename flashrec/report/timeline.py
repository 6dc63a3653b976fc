"""From journal lines to recoveries.

A recovery begins when the machine leaves RUNNING for FENCING or PLACING and ends at the next RUNNING (or STOPPED, or
the end of the journal). A further failure inside it raises the generation and belongs to the same recovery.

    fault        injected fault, if known from faults.jsonl: the first one of this recovery
    suspected    the detector first had doubts about what was then condemned
    detected     the event (and the verdict before it) that made the machine leave RUNNING
    fenced       every survivor has reported: FENCING is left for the last time
    placed       the last launch of replacements is asked for
    launched     the last replacement has built its model and reported
    formed       process groups are built: RESTORING begins
    restored     the last rank holds the state of the resume step
    resumed      RESTORING is left for RUNNING
    first step   the last rank has committed its first optimizer step since

Durations add up: rto = detect + fence + launch + form + restore + first step, where fence, launch, form and restore
are the time spent in FENCING, PLACING, FORMING and RESTORING (several times, if further failures came). Where the world
was resized there is hand_over, the time spent in RESIZING, as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from flashrec.report.records import FaultLine, Journal, Line

FAILURES = {"NodeCondemned", "NodesCondemned", "WorkerExited", "WorkerRaised", "LaunchFailed", "NodeLeft"}
PHASES = {
    "FENCING": "fence", "RESIZING": "hand_over", "PLACING": "launch", "FORMING": "form", "RESTORING": "restore",
}  # fmt: skip


class Mark(msgspec.Struct, frozen=True):
    """A moment of a recovery. mono: on the manager's clock; after_s: since the fault, or since detection without it."""

    name: str
    mono: float
    after_s: float


class Span(msgspec.Struct, frozen=True):
    """A stretch of a recovery, seconds since its origin. name: detect, fence, launch, form, restore, first_step."""

    name: str
    begin_s: float
    end_s: float


class FromPool(msgspec.Struct, frozen=True):
    """One request to the pool. allocate_s: until the node was granted; None: it was not. companion: the job's id."""

    node: str | None
    companion: int | None
    allocate_s: float | None
    said: str


class RungTaken(msgspec.Struct, frozen=True):
    """One rung of the ladder. ranks: whom it was taken for (none: all)."""

    rung: str
    ranks: tuple[int, ...]
    reason: str
    steps_lost: int | None


class Recovery(msgspec.Struct, frozen=True):
    """One recovery. None: the journal does not say."""

    number: int
    outcome: str  # recovered, stopped, unfinished
    wall: str
    generations: tuple[int, ...]
    reasons: tuple[str, ...]
    rungs: tuple[RungTaken, ...]
    faults: tuple[FaultLine, ...]
    launched: tuple[str, ...]
    from_pool: tuple[FromPool, ...]
    resume_step: int | None
    steps_redone: int | None
    moved_bytes: int | None
    rto_from: str  # fault, detection
    rto_s: float | None
    durations: dict[str, float | None]
    marks: tuple[Mark, ...]
    spans: tuple[Span, ...]


class Mirrored(msgspec.Struct, frozen=True):
    """What mirrors cost one rank: host memory for copies of its own state, and for what it holds of others; wait_ms: of
    each step; None: not measured yet."""

    rank: int
    own_bytes: int
    held_bytes: int
    wait_ms: float | None


class Timeline(msgspec.Struct, frozen=True):
    """A whole job. start_s: from the journal's first line to the first RUNNING. stragglers: 'rank 3: why', as often as
    a rank became one. mirrors: of each rank that has said, its last word."""

    job_id: int | str | None
    started: str | None
    start_s: float | None
    phase: str | None
    outcome: str
    exit_code: int | None
    recoveries: tuple[Recovery, ...]
    is_torn: bool
    unreadable_lines: tuple[int, ...]
    stragglers: tuple[str, ...] = ()
    mirrors: tuple[Mirrored, ...] = ()


def build_timeline(journal: Journal, faults: tuple[FaultLine, ...] = ()) -> Timeline:
    """All recoveries of a journal, with the faults that caused them."""
    lines = journal.lines
    moves = [line for line in lines if line.kind == "phase"]
    first_running = next((line for line in moves if line.after == "RUNNING"), None)
    over = next((line for line in reversed(lines) if line.kind == "note" and line.what == "job over"), None)
    stopped = next((line for line in moves if line.after == "STOPPED"), None)
    return Timeline(
        job_id=next((line.job_id for line in lines if line.job_id is not None), None),
        started=lines[0].wall if lines else None,
        start_s=first_running.mono - lines[0].mono if first_running else None,
        phase=moves[-1].after if moves else None,
        outcome=stopped.reason if stopped else "still running, or its manager ended without a word",
        exit_code=over.exit_code if over else None,
        recoveries=tuple(_recoveries(lines, faults)),
        is_torn=journal.is_torn,
        unreadable_lines=journal.unreadable,
        stragglers=tuple(
            f"{line.subject}: {line.reason}" for line in lines if line.kind == "verdict" and line.state == "slow"
        ),
        mirrors=_mirrors(lines),
    )


def _mirrors(lines: tuple[Line, ...]) -> tuple[Mirrored, ...]:
    found: dict[int, Mirrored] = {}
    for line in lines:
        if line.kind == "note" and line.what == "mirrors" and line.rank is not None:
            before = found.get(line.rank)
            wait_ms = line.wait_ms if line.steps else before.wait_ms if before else None
            found[line.rank] = Mirrored(line.rank, line.own_bytes, line.held_bytes, wait_ms)
    return tuple(found[rank] for rank in sorted(found))


def _recoveries(lines: tuple[Line, ...], faults: tuple[FaultLine, ...]) -> Iterator[Recovery]:
    begins = [
        _first_sign(lines, index)
        for index, line in enumerate(lines)
        if line.kind == "phase" and line.before == "RUNNING" and line.after in ("FENCING", "PLACING")
    ]
    left = faults
    for number, begin in enumerate(begins, 1):
        story = lines[begin : begins[number] if number < len(begins) else len(lines)]
        end = next((line.mono for line in story if _is_move(line, "RUNNING")), float("inf"))
        mine = tuple(fault for fault in left if fault.mono <= end)
        left = left[len(mine) :]
        yield _Story(story, mine, _suspicion(lines[:begin], story)).recovery(number)


def _is_move(line: Line, *after: str) -> bool:
    return line.kind == "phase" and line.after in after


def _first_sign(lines: tuple[Line, ...], start: int) -> int:
    """Index of the first of the lines that, without anything between, led to the move at `start`."""
    index = start
    if index > 0 and lines[index - 1].kind == "event" and lines[index - 1].event_type in FAILURES:
        index -= 1
        while index > 0 and lines[index - 1].kind == "verdict" and lines[index - 1].state == "dead":
            index -= 1
    return index


def _suspicion(before: tuple[Line, ...], story: tuple[Line, ...]) -> Line | None:
    """The last verdict 'suspect' about what the story begins with, unless it was taken back."""
    about = [line for line in before if line.kind == "verdict" and line.subject == story[0].subject]
    return about[-1] if story[0].kind == "verdict" and about and about[-1].state == "suspect" else None


class _Story:
    """The lines of one recovery, from its first sign to the line before the next one."""

    def __init__(self, lines: tuple[Line, ...], faults: tuple[FaultLine, ...], suspicion: Line | None):
        self.lines, self.faults, self.suspicion = lines, faults, suspicion
        self.moves = [line for line in lines if line.kind == "phase"]
        self.end = next((line for line in self.moves if line.after in ("RUNNING", "STOPPED")), None)
        self.resumed = self.end if self.end and self.end.after == "RUNNING" else None
        self.detected = lines[0].mono
        is_known = bool(faults) and faults[0].mono <= self.detected
        self.rto_from = "fault" if is_known else "detection"
        self.origin = faults[0].mono if is_known else self.detected
        self.generation = self.resumed.generation if self.resumed else self.moves[-1].generation

    def recovery(self, number: int) -> Recovery:
        fences = [move for move in self.moves if move.after == "FENCING" or move is self.moves[0]]
        plan, rungs = self._plan(), tuple(self._rungs())
        spans = tuple(self._spans())
        first_step = self._first_step()
        generations = {move.generation: None for move in self.moves if move.generation is not None}
        return Recovery(
            number=number,
            outcome="recovered" if self.resumed else "stopped" if self.end else "unfinished",
            wall=self.lines[0].wall,
            generations=tuple(generations),
            reasons=tuple(dict.fromkeys(move.reason for move in fences)),
            rungs=rungs,
            faults=self.faults,
            launched=tuple(self._launched()),
            from_pool=tuple(self._from_pool()),
            resume_step=plan.get("resume_step", self._loaded_step()) if self.resumed else None,
            steps_redone=self._steps_redone(plan, rungs) if self.resumed else None,
            moved_bytes=self._moved_bytes(),
            rto_from=self.rto_from,
            rto_s=None if first_step is None else first_step - self.origin,
            durations=self._durations(spans, first_step),
            marks=tuple(Mark(name, mono, mono - self.origin) for name, mono in self._marks() if mono is not None),
            spans=spans,
        )

    def _events(self, name: str, generation: int | None = None) -> list[Line]:
        """Events of one generation; None: of that which the recovery ended with."""
        wanted = self.generation if generation is None else generation
        return [line for line in self.lines if line.event_type == name and line.event.get("generation") == wanted]

    def _effects(self, name: str) -> list[Line]:
        stop = self.end.seq if self.end else self.lines[-1].seq
        return [line for line in self.lines if line.effect_type == name and line.seq <= stop]

    def _plan(self) -> dict[str, Any]:
        plans = [line.effect.get("plan", {}) for line in self._effects("PublishPlan")]
        return next(
            (plan for plan in reversed(plans) if plan.get("generation") == self.generation or plan.get("hands_over")),
            {},
        )

    def _loaded_step(self) -> int | None:
        """Where all ranks have started, when they went back to a checkpoint."""
        found = {line.event.get("v") for line in self._events("WorkerRestored")}
        return found.pop() if len(found) == 1 else None

    def _steps_redone(self, plan: dict[str, Any], rungs: tuple[RungTaken, ...]) -> int | None:
        """Those that were lost with a checkpoint. Else 1 if a survivor was in the resume step when it was interrupted
        (nobody was if all had paused at the end of a step); None without reports of survivors."""
        if rungs and rungs[-1].rung == "checkpoint":
            return rungs[-1].steps_lost
        decided_in = plan.get("generation", self.generation)
        reports = [line.event.get("report", {}) for line in self._events("WorkerReported", decided_in)]
        reached = [report.get("v") for report in reports if report.get("valid")]
        if not reached or plan.get("resume_step") is None:
            return None
        return int(plan["resume_step"] in reached and not plan.get("at_boundary"))

    def _joiners(self) -> set[int]:
        tasks = (task for line in self._effects("LaunchWorkers") for task in _tasks(line))
        return {task["rank"] for task in tasks if "rank" in task}

    def _rungs(self) -> Iterator[RungTaken]:
        """In the order in which they were taken."""
        for line in self._effects("TakeRung"):
            said = line.effect
            yield RungTaken(
                str(said.get("rung", "")), tuple(said.get("ranks", ())), str(said.get("reason", "")),
                said.get("steps_lost"),
            )  # fmt: skip

    def _launched(self) -> Iterator[str]:
        for line in self._effects("LaunchWorkers"):
            for node, tasks in line.effect.get("placement", {}).items():
                ranks = ", ".join(str(task.get("rank", "?")) for task in tasks)
                yield f"rank{'s' if len(tasks) > 1 else ''} {ranks} on {node}"

    def _from_pool(self) -> Iterator[FromPool]:
        """What was asked for in this recovery. Getting it is part of `fence` and `launch`, not a time of its own."""
        for asked in self._effects("RequestNode"):
            request = asked.effect.get("request")
            mine = [line for line in self.lines if line.event.get("request") == request]
            granted = next((line for line in mine if line.event_type == "NodeGranted"), None)
            refused = [line for line in mine if line.event_type == "NodeRefused"]
            note = next((line for line in self.lines if line.request == request and line.companion is not None), None)
            yield FromPool(
                node=granted.event.get("node") if granted else None,
                companion=note.companion if note and granted else None,
                allocate_s=granted.mono - asked.mono if granted else None,
                said=str(refused[-1].event.get("reason", "")) if refused else "",
            )

    def _moved_bytes(self) -> int | None:
        restored = self._events("WorkerRestored")
        return sum(line.event.get("moved_bytes", 0) for line in restored) if restored and self.resumed else None

    def _first_step(self) -> float | None:
        """When the last rank committed; None while some rank that was restored has not."""
        restored = {line.event.get("rank") for line in self._events("WorkerRestored")}
        commits: dict[Any, float] = {}
        for line in self._events("WorkerCommitted"):
            commits.setdefault(line.event.get("rank"), line.mono)
        return max(commits.values()) if self.resumed and commits and restored <= set(commits) else None

    def _marks(self) -> Iterator[tuple[str, float | None]]:
        yield "fault", self.origin if self.rto_from == "fault" else None
        yield "suspected", self.suspicion.mono if self.suspicion else None
        yield "detected", self.detected
        fenced = [move for move in self.moves if move.before == "FENCING" and move.after in ("PLACING", "FORMING")]
        yield "fenced", fenced[-1].mono if fenced else None
        launches = self._effects("LaunchWorkers")
        yield "placed", launches[-1].mono if launches else None
        joined = [line.mono for line in self._events("WorkerReported") if line.event.get("rank") in self._joiners()]
        yield "launched", max(joined, default=None)
        formed = [move for move in self.moves if _is_move(move, "RESTORING")]
        yield "formed", formed[-1].mono if formed else None
        restored = self._events("WorkerRestored") if self.resumed else []
        yield "restored", max((line.mono for line in restored), default=None)
        yield "resumed", self.resumed.mono if self.resumed else None
        yield "first step", self._first_step()

    def _spans(self) -> Iterator[Span]:
        if self.rto_from == "fault":
            yield Span("detect", 0.0, self.detected - self.origin)
        begin = self.detected
        for move, following in zip(self.moves, self.moves[1:], strict=False):
            if move.after not in PHASES:
                break
            yield Span(PHASES[move.after], begin - self.origin, following.mono - self.origin)
            begin = following.mono
        first_step = self._first_step()
        if first_step is not None and self.resumed:
            yield Span("first_step", self.resumed.mono - self.origin, first_step - self.origin)

    def _durations(self, spans: tuple[Span, ...], first_step: float | None) -> dict[str, float | None]:
        """Seconds by name; a phase that the recovery did not get through is unknown, one it had no need of takes 0."""
        durations: dict[str, float | None] = {}
        for name in ("detect", *PHASES.values(), "first_step"):
            mine = [span.end_s - span.begin_s for span in spans if span.name == name]
            is_known = bool(mine) if name in ("detect", "first_step") else self.resumed is not None
            if mine or name != "hand_over":
                durations[name] = sum(mine) if is_known else None
        return durations


def _tasks(line: Line) -> Iterator[dict[str, Any]]:
    for tasks in line.effect.get("placement", {}).values():
        yield from tasks
