"""The columns of the matrix, each a case for any layout: which rank is hit is different from column to column."""

from __future__ import annotations

from typing import NamedTuple

from tests.chaos.case import AtPlace, Case, Fault
from tests.runtime.layouts.layout import Layout


class Column(NamedTuple):
    """how: 'kill' or 'stop'. also: where in the recovery the source is killed, too."""

    name: str
    step: int
    place: str
    how: str = "kill"
    also: str = ""
    means: str = ""


COLUMNS = {
    column.name: column
    for column in (
        Column("forward", 0, "forward", means="in the forward of the first step"),
        Column("backward", 0, "backward", means="in the backward of the first step, some gradients reduced"),
        Column("late-backward", 3, "backward", means="the same in a later step: buckets are rebuilt, groups are warm"),
        Column("before-vote", 4, "before-vote", means="all gradients are there, not voted"),
        Column("optimizer", 2, "in-optimizer", means="inside the optimizer step, voted"),
        Column("amid", 3, "amid-optimizer", means="between two collectives of an optimizer that communicates"),
        Column("after-optimizer", 3, "after-optimizer", means="right after the optimizer step, before the scheduler"),
        Column("between", 2, "between", means="between two steps"),
        Column("stop-forward", 1, "forward", "stop", means="SIGSTOP: the rank neither answers nor closes anything"),
        Column("stop-backward", 3, "backward", "stop", means="the same in the backward"),
        Column("stop-optimizer", 2, "in-optimizer", "stop", means="the same inside the optimizer step"),
        Column("source", 2, "backward", also="sending", means="and its source dies with half of the state sent"),
    )
}


def case_of(layout: Layout, column: Column, index: int = 0) -> Case:
    """The case of one cell; index makes its name."""
    number = list(COLUMNS).index(column.name)
    victim = (layout.world_size - 1 + number) % layout.world_size
    faults = [Fault(victim, AtPlace(column.step, column.place), column.how)]
    if column.also:
        source = _source_of(victim, layout)
        faults.append(Fault(source, AtPlace(-1, column.also)))
    return Case(layout.name, layout.world_size, tuple(faults), patience_s=5.0, seed=0, index=index)


def _source_of(victim: int, layout: Layout) -> int:
    """Who will restore it: of its replicas the lowest, or the holder of its mirror, each rank being a node."""
    if layout.is_mirrored:
        return (victim + 1) % layout.world_size
    return min(next(group for group in layout.replica_groups(layout.world_size) if victim in group) - {victim})


def columns_for(layout: Layout) -> tuple[Column, ...]:
    """A layout without replicas is hit once, and that must be refused. Where two ranks hold a shard, or one and
    the holder of its mirror, losing the source, too, must be refused as well."""
    return tuple(COLUMNS.values()) if layout.is_protected else (COLUMNS["late-backward"],)
