"""The commit decision: at which step does everybody resume, and from whom does each joiner get its state.

A rank votes when it can bring itself to the next step alone: just before its optimizer step, after the last gradient
is reduced; or, if the optimizer communicates, right after it. So:

    some survivor is at v = T, or has passed the vote of T-1  →  every rank could reach T alone: resume at T.
        Those still at v = T-1 that voted do so (roll forward): they apply their update, or keep the one that is done.
    nobody passed                                              →  resume at the common v (redo the step).
        An update that was done or cut before its vote was passed is undone by its rank.

A survivor that can do neither (torn state, or behind by more than the vote allows) becomes a target like a joiner. A
source is valid and at T. If a shard has no such holder left, `Impossible` names the ranks: never a guess.

With mirrors there is more to restore from: the copy of its state at the start of a step that a rank keeps, and the one
that a rank on another node holds of it. Nobody votes in step T-1 before its state of T-1 is mirrored, so if a shard
has no holder at T, the whole job can go back to T-1 (`goes_back`): one more step is done again.

In a planned swap the former lives of the ranks that move stand by: what they report counts as evidence, and a rank
whose shard nobody else holds gets it from its own former life.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flashrec.core.mirrors import assign_holders
from flashrec.core.ranks import in_words
from flashrec.core.replicas import assign_sources, assign_stripes
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
    lost = sorted([rank for rank, report in reports.items() if not report.valid] + behind)
    back = [rank for rank in lost if resume_step in reports[rank].keeps]
    targets = [rank for rank in lost if rank not in back]
    sources, orphans = assign_sources(targets, [*ready, *back], forward, reports)
    stripes = assign_stripes(sources, ready, reports)
    moved = {rank: rank for rank in orphans if rank in standing_by and standing_by[rank].v == resume_step}
    sources, orphans = sources | moved, tuple(rank for rank in orphans if rank not in moved)
    mirrored, orphans = assign_holders(orphans, resume_step, [*ready, *back, *forward], reports)
    if orphans:
        return _one_step_back(generation, resume_step - 1, reports, orphans) or Impossible(
            orphans, _why_not(orphans, resume_step, reports)
        )
    reason = _explain(resume_step, ready, forward, valid)
    return Plan(
        generation,
        resume_step,
        tuple(forward),
        sources | mirrored,
        reason,
        mirrored=tuple(mirrored),
        goes_back=tuple(back),
        stripes=stripes,
    )


def _one_step_back(generation: int, step: int, reports: Mapping[int, Report], orphans: tuple[int, ...]) -> Plan | None:
    """Everybody at the start of `step` again; orphans: why. None: not everything of it is there."""
    if not any(step in report.keeps for report in reports.values()):
        return None
    here = [rank for rank, report in sorted(reports.items()) if report.valid and report.v == step]
    back = [rank for rank, report in sorted(reports.items()) if step in report.keeps and rank not in here]
    targets = sorted(reports.keys() - {*here, *back})
    sources, missing = assign_sources(targets, here, back, reports)
    mirrored, missing = assign_holders(missing, step, [*here, *back], reports)
    if missing:
        return None
    reason = (
        f"step {step} was done, but the state of rank {in_words(orphans)} after it is not mirrored: "
        f"rank {in_words(back)} go back, do step {step} again"
    )
    return Plan(generation, step, (), sources | mirrored, reason, mirrored=tuple(mirrored), goes_back=tuple(back))


def _why_not(orphans: tuple[int, ...], resume_step: int, reports: Mapping[int, Report]) -> str:
    text = f"no replica of the shard of rank {in_words(orphans)} is left at step {resume_step}"
    if not any(report.keeps or report.holds for report in reports.values()):
        return text
    held = {rank: sorted({v for r in reports.values() for v in r.holds.get(rank, ())}) for rank in orphans}
    return f"{text}, and no mirror of that step; mirrors that are left (rank: steps): {held}"


def _explain(resume_step: int, ready: list[int], forward: list[int], valid: Mapping[int, Report]) -> str:
    if forward:
        return (
            f"step {resume_step - 1} was voted by all: rank {in_words(forward)} roll forward, resume at {resume_step}"
        )
    if any(r.v == resume_step and r.voted == resume_step for r in valid.values()):
        return f"nobody saw the vote of step {resume_step} complete: redo it"
    return f"all {len(ready)} survivors are at step {resume_step}: resume there"
