"""Plays one case: starts the layout, sees to it that the faults hit, looks after the job, judges what came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from flashrec.core import commit, events
from flashrec.core.commit import Impossible
from flashrec.core.types import Plan, Report
from flashrec.wire import messages as m
from tests.chaos.case import SOURCE, After, AtPlace, Case, OnMessage, Together, describe
from tests.chaos.draw import STEPS
from tests.chaos.figures import measure
from tests.chaos.ledger import Ledger, MirrorLedger
from tests.runtime.attendant import Attendant, Ending
from tests.runtime.layouts import program
from tests.runtime.layouts.layout import TABLE
from tests.runtime.layouts.outcome import Outcome
from tests.runtime.support import Cluster
from tests.support.cluster import is_gone

TIMEOUT_S = 240.0  # of a case; on a busy machine compiled ones take minutes
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Result(msgspec.Struct):
    """verdict: 'right', 'refused' (as the replica rule predicts), 'missed' (some fault did not fire, nothing is wrong),
    'wrong' or 'hung'. figures: see `tests.chaos.figures`."""

    verdict: str
    why: str = ""
    num_losses: int = 0
    num_gave_up: int = 0
    seconds: float = 0.0
    log: str = ""
    figures: dict[str, float] = {}


def play(case: Case, folder: Path, wanted: Outcome) -> Result:
    """Play it in `folder`; wanted: the undisturbed run."""
    return _Game(case, folder).play(wanted)


class _Game:
    """One case being played."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder
        self._cluster = Cluster(folder, case.world_size)
        self._cluster.watch, self._cluster.decide = self._watch, self._decide
        layout = TABLE[case.layout]
        kind = MirrorLedger if layout.is_mirrored else Ledger
        self._ledger = kind(layout.replica_groups(case.world_size))
        self._tried: set[int] = set()
        self._fired: set[int] = set()
        self._resumed_at = 0.0
        self._source = -1
        within = [(f.victim, f.when.life, f.when.step, f"{'stop-' * (f.how == 'stop')}{f.when.place}")
                  for f in case.faults if isinstance(f.when, AtPlace)]  # fmt: skip
        self._attendant = Attendant(
            self._cluster,
            program.train,
            {"layout": case.layout, "steps": STEPS, "faults": within},
            patience_s=case.patience_s,
            gather_s=case.gather_s,
            on_lost=self._on_lost,
            before_fence=self._before_fence,
            on_tick=self._on_tick,
        )

    def play(self, wanted: Outcome) -> Result:
        began = time.monotonic()
        try:
            self._attendant.start()
            ending = self._attendant.run(TIMEOUT_S)
        finally:
            self._cluster.close()
        verdict, why = self._judge(ending, wanted)
        return Result(
            verdict,
            why,
            self._attendant.num_losses,
            len(self._attendant.gave_up),
            time.monotonic() - began,
            "" if verdict in ("right", "refused", "missed") else self._cluster.logs(),
            measure(self._cluster, Outcome(self._folder, self._case.world_size)),
        )

    def _judge(self, ending: Ending, wanted: Outcome) -> tuple[str, str]:
        differences = Outcome(self._folder, self._case.world_size).differences(
            wanted, is_complete=ending is Ending.DONE
        )
        problems = self._ledger.problems + differences
        if ending is Ending.HUNG:
            return "hung", self._attendant.why
        if ending is Ending.FAILED:
            problems.insert(0, self._attendant.why)
        if problems:
            return "wrong", "; ".join(problems)
        if ending is Ending.REFUSED:
            return "refused", self._ledger.refusals[-1]
        missed = [fault for i, fault in enumerate(self._case.faults) if not self._has_fired(i)]
        return ("missed", ", ".join(map(describe, missed))) if missed else ("right", "")

    def _has_fired(self, index: int) -> bool:
        fault = self._case.faults[index]
        if not isinstance(fault.when, AtPlace):
            return index in self._fired
        log = self._folder / f"rank{fault.victim}.{fault.when.life}.log"
        said = log.read_text(errors="replace") if log.exists() else ""
        return any(
            line.startswith("fault ") and line.endswith(f"at {fault.when.step} {fault.when.place}")
            for line in said.splitlines()
        )

    # ---- seen from outside

    def _watch(self, rank: int, message: m.Message) -> None:
        """Called by the double of the control plane, before a message has an effect."""
        match message:
            case events.WorkerRestored(incarnation=life):
                self._ledger.restored(rank, life)
            case m.KeyPosted(group=group) if group == f"restore/{rank}":
                self._ledger.begin_restore(rank)
        is_address = not isinstance(message, m.KeyPosted) or message.group.startswith("restore/")
        if is_address:
            self._strike_on(type(message).__name__, rank, getattr(message, "generation", 0))

    def _decide(
        self, generation: int, reports: Mapping[int, Report], former: Mapping[int, Report] | None = None
    ) -> Plan | Impossible:
        verdict = commit.decide(generation, reports, former)
        self._ledger.judge(reports, verdict)
        if isinstance(verdict, Plan) and verdict.sources:
            self._source = verdict.sources[min(verdict.sources)]
            self._strike_on("PlanPublished", None, generation)
        return verdict

    def _strike_on(self, message: str, sender: int | None, generation: int) -> None:
        for i, fault in enumerate(self._case.faults):
            when = fault.when
            if not isinstance(when, OnMessage) or sender not in (None, when.sender):
                continue
            if when.message == message and generation == 1 + when.recovery:
                self._strike(i, self._source if fault.victim == SOURCE else fault.victim)

    def _on_lost(self, ranks: set[int]) -> set[int]:
        return {
            fault.victim
            for i, fault in enumerate(self._case.faults)
            if isinstance(fault.when, Together) and fault.when.rank in ranks and self._strike(i, fault.victim)
        }

    def _before_fence(self, ranks: set[int]) -> None:
        for rank in ranks:
            self._ledger.lose(rank, self._cluster.incarnation[rank])

    def _on_tick(self) -> None:
        if not self._cluster.resumed:
            return
        self._resumed_at = self._resumed_at or time.monotonic()
        for i, fault in enumerate(self._case.faults):
            if isinstance(fault.when, After) and time.monotonic() >= self._resumed_at + fault.when.seconds:
                self._strike(i, fault.victim)

    def _strike(self, index: int, victim: int) -> bool:
        """Once. False: missed, because the victim is gone already, or the last step is done."""
        if index in self._tried or victim < 0:
            return False
        self._tried.add(index)
        process: Any = self._cluster.processes[victim]
        if self._is_over() or is_gone(process.pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, _SIGNALS[self._case.faults[index].how])
            self._fired.add(index)
        return index in self._fired

    def _is_over(self) -> bool:
        return any(isinstance(message, events.WorkerFinished) for _, _, message in list(self._cluster.messages))
