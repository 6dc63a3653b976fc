"""The pool of spare nodes: what `flashrec pool sync` has to change. Pure: facts in, actions out, each with its reason.

The pool is a reservation with a list of nodes. Not with a count and REPLACE_DOWN, although Slurm then replaces a DOWN
node by itself: such a list cannot be edited, and only nodes with the same feature come in. Who belongs to the pool:

* nodes with the feature, up to `size`; those that are in it already first, busy ones too;
* while there are too few of them, idle substitutes (another feature, if the site names one), which go again once they
  are idle and no longer needed.

A node that Slurm cannot use leaves, if that does not empty the reservation; a member that just does not answer stays,
that passes more often than not. A companion job whose job has ended is cancelled. Facts are Slurm's own; of a job only
its admin comment, which users cannot set, its state and its user count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Union

import msgspec

from flashrec.slurm.hostlist import compress
from flashrec.slurm.scheduler import UNUSABLE, JobInfo, NodeInfo, ReservationInfo

DRAIN_PREFIX = "flashrec pool: "
# Slurm wants a name: everybody but a user that every system has and nobody is. (26.05 refuses `nobody` itself.)
EVERYBODY = ("-daemon",)
FLAGS = frozenset({"IGNORE_JOBS", "SPEC_NODES"})
_HARMFUL_FLAGS = frozenset(
    {"REPLACE", "REPLACE_DOWN", "MAGNETIC", "FLEX", "OVERLAP", "ANY_NODES", "ALL_NODES", "DAILY"}
)
_SERVES = re.compile(r"flashrec:spare-for=([0-9]{1,10})")
_YEAR_S = 365 * 86400.0
_RENEW_BEFORE_S = 60 * 86400.0


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """size None: all nodes with the feature. substitutes: feature of nodes that may stand in; '': none."""

    name: str = "flashspare"
    feature: str = "flashspare"
    size: int | None = None
    substitutes: str = ""
    users: tuple[str, ...] = EVERYBODY


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """jobs: all that have not ended, of every user."""

    nodes: Mapping[str, NodeInfo]
    reservations: Sequence[ReservationInfo]
    jobs: Sequence[JobInfo]

    def reservation(self, name: str) -> ReservationInfo | None:
        return next((held for held in self.reservations if held.name == name), None)


class CreatePool(msgspec.Struct, frozen=True):
    nodes: tuple[str, ...]
    reason: str


class DeletePool(msgspec.Struct, frozen=True):
    reason: str


class SetNodes(msgspec.Struct, frozen=True):
    nodes: tuple[str, ...]
    reason: str


class ExtendPool(msgspec.Struct, frozen=True):
    """minutes: the new duration, counted from the reservation's start."""

    minutes: int
    reason: str


class CancelJob(msgspec.Struct, frozen=True):
    job_id: int
    reason: str


class Complain(msgspec.Struct, frozen=True):
    """Something that only a person can mend."""

    reason: str


Action = Union[CreatePool, DeletePool, SetNodes, ExtendPool, CancelJob, Complain]


def served_job(job: JobInfo) -> int | None:
    """The job that this companion job serves; None if it is none. Only the admin comment says so."""
    match = _SERVES.fullmatch(job.admin_comment)
    return int(match[1]) if match else None


def plan_sync(config: PoolConfig, facts: PoolFacts, now: float) -> list[Action]:
    """What to do, in this order. Planning again after it was done gives nothing but complaints."""
    held = facts.reservation(config.name)
    members = choose_members(config, facts, held)
    actions: list[Action] = [*orphans(facts.jobs)]
    wanted = wanted_size(config, facts)
    usable = [name for name in members if name in facts.nodes and not _is_lost(facts.nodes[name])]
    if len(usable) < wanted:
        actions.append(Complain(f"{len(usable)} usable nodes for a pool of {wanted}: {_shortage(config)}"))
    if held is None:
        if members:
            actions.append(CreatePool(members, f"there is no reservation {config.name}"))
        return actions
    wrong = held.flags & _HARMFUL_FLAGS | {f"without {flag}" for flag in FLAGS - held.flags}
    wrong |= {f"for account {account}" for account in held.accounts}
    if _plain(held.users) != _plain(config.users):
        wrong |= {f"for users {','.join(held.users) or '(none)'}"}
    if wrong:
        return [*actions, *_remake(config, facts, members, wrong)]
    if members and set(members) != set(held.nodes):
        actions.append(SetNodes(members, _difference(facts, set(held.nodes), set(members))))
    return [*actions, *_renewal(held, now)]


def wanted_size(config: PoolConfig, facts: PoolFacts) -> int:
    if config.size is not None:
        return config.size
    return sum(config.feature in node.features for node in facts.nodes.values())


def choose_members(config: PoolConfig, facts: PoolFacts, held: ReservationInfo | None) -> tuple[str, ...]:
    """Names of the nodes that make the pool now, sorted; none if there is no usable one."""
    current = frozenset(held.nodes) if held else frozenset()
    elsewhere = {name for other in facts.reservations if other.name != config.name for name in other.nodes}
    ranked = []
    for node in facts.nodes.values():
        rank = _rank(config, node, node.name in current)
        if rank is not None and (node.name in current or node.name not in elsewhere):
            ranked.append((rank, node.name))
    chosen = [name for _, name in sorted(ranked)][: wanted_size(config, facts)]
    return tuple(sorted(chosen))


def _rank(config: PoolConfig, node: NodeInfo, is_member: bool) -> int | None:
    """The smaller, the sooner it is taken; None: never."""
    if _is_lost(node) or (not is_member and not node.is_usable):
        return None
    if config.feature in node.features:
        if is_member:
            return 0
        return 3 if node.is_busy else 2
    if is_member and node.is_busy:
        return 1  # serves a job just now
    if config.substitutes and config.substitutes in node.features and not node.is_busy:
        return 4 if is_member else 5
    return None


def _is_lost(node: NodeInfo) -> bool:
    return bool(node.states & (UNUSABLE - {"NOT_RESPONDING"}))


def orphans(jobs: Sequence[JobInfo]) -> list[CancelJob]:
    """Companion jobs whose job has ended, or whose number now belongs to another user's job."""
    alive = {job.job_id: job for job in jobs if not job.is_finished}
    found = []
    for job in alive.values():
        served = served_job(job)
        if served is None:
            continue
        main = alive.get(served)
        if main is None or main.user_id != job.user_id:
            found.append(CancelJob(job.job_id, f"companion job of job {served}, which has ended"))
    return found


def _remake(config: PoolConfig, facts: PoolFacts, members: tuple[str, ...], wrong: frozenset[str]) -> list[Action]:
    """Flags and kind of a reservation cannot be changed, and users not either (`users=-daemon` is taken and changes
    nothing on 22.05, and is an error on 26.05): make it anew, if nobody works in it."""
    text = f"reservation {config.name} was not made by flashrec ({', '.join(sorted(wrong))})"
    if any(job.reservation == config.name for job in facts.jobs):
        return [Complain(f"{text}; it can only be made anew once no job uses it")]
    return [DeletePool(text), CreatePool(members, text)] if members else [Complain(text)]


def _renewal(held: ReservationInfo, now: float) -> list[Action]:
    """Slurm's infinite is a year from the start."""
    if held.end_time is None or held.start_time is None or held.end_time - now > _RENEW_BEFORE_S:
        return []
    minutes = int((now + _YEAR_S - held.start_time) // 60)
    return [ExtendPool(minutes, f"it would end in {max(0.0, held.end_time - now) / 86400:.0f} days")]


def _plain(users: Sequence[str]) -> frozenset[str]:
    """Some releases show '-name' as a name with a flag."""
    return frozenset(user.lstrip("-") for user in users)


def _shortage(config: PoolConfig) -> str:
    text = f"mend nodes, or give more nodes Feature={config.feature}"
    return text if config.substitutes else f"{text}, or name substitutes"


def _difference(facts: PoolFacts, before: set[str], after: set[str]) -> str:
    parts = []
    for name in sorted(before - after):
        node = facts.nodes.get(name)
        lost = "+".join(sorted(node.states)) if node else "unknown to Slurm"
        parts.append(f"-{name} ({lost})")
    if after - before:
        parts.append(f"+{compress(after - before)}")
    return " ".join(parts)
