"""Recoveries as words and bars of plain text; the command line adds the colours."""

from __future__ import annotations

from collections.abc import Sequence

from flashrec.report.timeline import FromPool, Mirrored, Recovery, Span

UNKNOWN = "unknown"
LABELS = {
    "detect": "detect",
    "fence": "fence",
    "hand_over": "hand over",
    "launch": "launch",
    "form": "form",
    "restore": "restore",
    "first_step": "first new step",
}
MEANINGS = {
    "detect": "from the fault to the verdict",
    "fence": "survivors left their collectives and reported",
    "hand_over": "states put aside for a world of another size",
    "launch": "replacements built their model",
    "form": "process groups built",
    "restore": "replacements hold the state",
    "first_step": "from resume to the last rank's new step",
}


def seconds(value: float | None) -> str:
    """1.234 s, or unknown."""
    return UNKNOWN if value is None else f"{value:.3f} s"


def count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def size(value: int | None) -> str:
    """Bytes for people: 2.8 MB, or unknown."""
    if value is None:
        return UNKNOWN
    amount = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def total_s(recovery: Recovery) -> float:
    """Length of what is drawn of a recovery: to its last span or mark."""
    return max([span.end_s for span in recovery.spans] + [mark.after_s for mark in recovery.marks] + [0.0])


def bar(spans: list[Span], total: float, width: int) -> str:
    """`width` characters, full where one of the spans is; a span that is there at all has at least one character."""
    cells = [" "] * width
    for span in spans:
        first = min(int(span.begin_s / total * width), width - 1) if total > 0 else 0
        last = min(max(first, round(span.end_s / total * width) - 1), width - 1) if total > 0 else 0
        cells[first : last + 1] = "█" * (last + 1 - first)
    return "".join(cells)


def headline(recovery: Recovery) -> str:
    """One line: which recovery, how it ended, in what time."""
    rto = f"{seconds(recovery.rto_s)} from {recovery.rto_from} to the first new step"
    text = {"recovered": rto, "stopped": "the job stopped in it", "unfinished": "not over when the journal ends"}
    generations = ", ".join(map(str, recovery.generations))
    return f"Recovery {recovery.number} (generation {generations}): {text[recovery.outcome]}"


def pool_answer(answer: FromPool) -> str:
    """Which node came after how long, or what the pool said instead."""
    if answer.node is None:
        return answer.said or "no answer"
    waited = f"; {answer.said}" if answer.said else ""
    job = UNKNOWN if answer.companion is None else str(answer.companion)
    return f"{answer.node} (companion job {job}), allocated in {seconds(answer.allocate_s)}{waited}"


def details(recovery: Recovery) -> list[tuple[str, str]]:
    """Label and text of everything that is not a duration."""
    rows = [("because", reason) for reason in recovery.reasons]
    rows += [("rung", f"{taken.rung}: {taken.reason}") for taken in recovery.rungs]
    for fault in recovery.faults:
        place = f"at {fault.place} of step {fault.step}" if fault.step is not None else f"at {fault.place}"
        rows.append(("injected", f"{fault.id}: {fault.kind} of rank {fault.rank} on {fault.node}, {place}"))
    rows += [("replaced by", launched) for launched in recovery.launched]
    rows += [("from the pool", pool_answer(answer)) for answer in recovery.from_pool]
    rows.append(("resumed at step", count(recovery.resume_step)))
    rows.append(("steps redone", count(recovery.steps_redone)))
    rows.append(("state moved", size(recovery.moved_bytes)))
    return rows


def mirrors(found: Sequence[Mirrored]) -> str:
    """One line: what mirrors cost the job; the worst rank stands for all. '' without mirrors."""
    if not found:
        return ""
    worst = max(found, key=lambda each: each.own_bytes + each.held_bytes)
    slow = max(found, key=lambda each: each.wait_ms or 0.0)
    waited = UNKNOWN if slow.wait_ms is None else f"{slow.wait_ms:.2f} ms per step (rank {slow.rank})"
    return (
        f"on {len(found)} ranks, up to {size(worst.own_bytes + worst.held_bytes)} of host memory (rank {worst.rank}: "
        f"{size(worst.own_bytes)} of its own, {size(worst.held_bytes)} held for others), waited for: {waited}"
    )
