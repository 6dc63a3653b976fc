"""The commit decision: at which step does everybody resume, and from whom does each joiner get its state.

A rank votes when it can bring itself to the next step alone: just before its optimizer step, after the last gradient
is reduced; or, if the optimizer communicates, right after it. So:

    some survivor is at v = T, or has passed the vote of T-1  →  every rank could reach T alone: resume at T.
        Those still at v = T-1 that voted do so (roll forward): they apply their update, or keep the one that is done.
    nobody passed                                              →  resume at the common v (redo the step).
        An update that was done or cut before its vote was passed is undone by its rank.

A survivor that can do neither (torn state, or behind by more than the vote allows) becomes a target like a joiner. A
source is valid and at T. If a shard has no such holder left, `Impossible` names the ranks: never a guess.

In a planned swap the former lives of the ranks that move stand by: what they report counts as evidence, and a rank
whose shard nobody else holds gets it from its own former life.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flashrec.core.replicas import assign_sources
from flashrec.core.types import Plan, Report


class Impossible(msgspec.Struct, frozen=True):
    """No replica of some shard is left. ranks: those that cannot be restored."""

    ranks: tuple[int, ...]
    reason: str


def decide(
    generation: int, reports: Mapping[int, Report], former: Mapping[int, Report] | None = None
) -> Plan | Impossible:
    """Decide from one report per rank (joiners say valid=False); former: those of the lives that stand by.

    Deterministic; the order of reports has no effect.
    """
    valid = {rank: report for rank, report in sorted(reports.items()) if report.valid}
    standing_by = {rank: report for rank, report in (former or {}).items() if report.valid}
    if not valid and not standing_by:
        return Impossible(tuple(sorted(reports)), "no rank with a valid state is left")
    resume_step = max(max(r.v, r.passed + 1) for r in (*valid.values(), *standing_by.values()))
    ready, forward, behind = [], [], []
    for rank, report in valid.items():
        if report.v == resume_step:
            ready.append(rank)
        elif report.v == resume_step - 1 and report.voted == report.v:
            forward.append(rank)
        else:
            behind.append(rank)
    targets = sorted([rank for rank, report in reports.items() if not report.valid] + behind)
    sources, orphans = assign_sources(targets, ready, forward, reports)
    moved = {rank: rank for rank in orphans if rank in standing_by and standing_by[rank].v == resume_step}
    sources, orphans = sources | moved, tuple(rank for rank in orphans if rank not in moved)
    if orphans:
        return Impossible(orphans, f"no replica of the shard of rank {_ranks(orphans)} is left at step {resume_step}")
    return Plan(generation, resume_step, tuple(forward), sources, _explain(resume_step, ready, forward, valid))


def _explain(resume_step: int, ready: list[int], forward: list[int], valid: Mapping[int, Report]) -> str:
    if forward:
        return f"step {resume_step - 1} was voted by all: rank {_ranks(forward)} roll forward, resume at {resume_step}"
    if any(r.v == resume_step and r.voted == resume_step for r in valid.values()):
        return f"nobody saw the vote of step {resume_step} complete: redo it"
    return f"all {len(ready)} survivors are at step {resume_step}: resume there"


def _ranks(ranks: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
