"""What follows from a run of the checks: pure decisions over what is remembered and what Slurm says now.

Many nodes may fail in the same second (a file server dies) and none can know of the others beforehand. So a node first
looks whether there is room, drains, waits SETTLE_S, and looks again: of all nodes that bear our prefix the earliest
`max_drained` keep it, by the controller's own time of the reason, then by name; a later one takes its own back. After
SETTLE_S the second in which it drained is over, so all who look see the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flashrec.admin.health.reason import bears, is_ours, write
from flashrec.admin.health.state import State
from flashrec.health import Report, Settings, Status
from flashrec.slurm.scheduler import NodeInfo

# Somebody is at work on such a node, or Slurm has taken it out of service already.
_LEAVE_ALONE = frozenset(
    {"DOWN", "ERROR", "FAIL", "FUTURE", "MAINT", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN"}
    | {"POWER_UP", "REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "UNKNOWN"}
)


class Keep(msgspec.Struct, frozen=True):
    """Change nothing. is_drained: the node bears our own reason."""

    why: str
    is_drained: bool = False


class Drain(msgspec.Struct, frozen=True):
    reason: str


class Undrain(msgspec.Struct, frozen=True):
    why: str


Decision = Keep | Drain | Undrain


def needs_slurm(state: State, settings: Settings) -> bool:
    """False on a healthy node: its run then asks Slurm nothing at all."""
    return state.fails >= settings.fail_runs or state.may_be_drained


def decide(node: NodeInfo, nodes: Mapping[str, NodeInfo], state: State, report: Report, settings: Settings) -> Decision:
    """node: this one; nodes: all."""
    if "DRAIN" in node.states:
        return _of_drained(node, nodes, state, settings)
    if state.fails < settings.fail_runs:
        return Keep(f"failed {state.fails} times in a row, drained from {settings.fail_runs} on" if state.fails else "")
    taken = node.states & _LEAVE_ALONE
    if taken:
        return Keep(f"not drained: Slurm says {', '.join(sorted(taken))}")
    if node.is_busy and settings.drain_busy == "no":
        return Keep("not drained: the node is busy, and drain_busy = no")
    others = [other for other in bearers(nodes, settings) if other.name != node.name]
    if len(others) >= settings.max_drained:
        return Keep(f"not drained: {len(others)} nodes are already, max_drained = {settings.max_drained}")
    return Drain(write(settings.prefix, complaint(report)))


def _of_drained(node: NodeInfo, nodes: Mapping[str, NodeInfo], state: State, settings: Settings) -> Decision:
    if not is_ours(settings.prefix, node.reason):
        return Keep("drained, but not by us or the reason was changed: left alone")
    if state.must_recount and is_one_too_many(node, nodes, settings):
        return Undrain(f"more than max_drained = {settings.max_drained} nodes were drained at once")
    if state.oks >= settings.ok_runs:
        return Undrain(f"all that had failed is well, {state.oks} times in a row")
    return Keep(f"drained by us; well {state.oks} times in a row, undrained from {settings.ok_runs} on", True)


def bearers(nodes: Mapping[str, NodeInfo], settings: Settings) -> list[NodeInfo]:
    """Drained nodes that bear our prefix, edited or not."""
    return [node for node in nodes.values() if "DRAIN" in node.states and bears(settings.prefix, node.reason)]


def is_one_too_many(node: NodeInfo, nodes: Mapping[str, NodeInfo], settings: Settings) -> bool:
    """True if as many as may be were drained before this node. An unknown time counts as earlier."""
    earlier = [
        other
        for other in bearers(nodes, settings)
        if other.name != node.name
        and (
            other.reason_time is None
            or node.reason_time is None
            or (other.reason_time, other.name) < (node.reason_time, node.name)
        )
    ]
    return len(earlier) >= settings.max_drained


def complaint(report: Report) -> str:
    """'disk: /scratch is mounted read-only; gpu: …' of the checks that failed."""
    return "; ".join(
        f"{finding.verdict.check}: {finding.verdict.reason}" for finding in report.with_status(Status.FAIL)
    )
