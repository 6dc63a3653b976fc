"""Effects: what the core asks the edge to do (imperative). Each may be performed twice without harm."""

from __future__ import annotations

from typing import Union

import msgspec

from flashrec.core.types import Assignment, Phase, Plan


class Effect(msgspec.Struct, frozen=True, tag=True):
    """Base of all effects; the class name is the tag in the journal."""


class ChangePhase(Effect, frozen=True):
    """Not an action: the machine moved, and why. The edge writes it into the journal."""

    before: Phase
    after: Phase
    generation: int
    reason: str


class AnnounceFence(Effect, frozen=True):
    """Tell every agent (and it, its workers) that `generation` supersedes everything older. at_boundary: once all ranks
    have agreed, in a vote, to pause at the end of their step; until then they train on."""

    generation: int
    reason: str
    at_boundary: bool = False


class KillWorkers(Effect, frozen=True):
    """SIGKILL (rank, incarnation) pairs on one node."""

    node: str
    workers: tuple[tuple[int, int], ...]
    reason: str


class LaunchWorkers(Effect, frozen=True):
    """Start one job step: node -> assignments."""

    placement: dict[str, tuple[Assignment, ...]]
    reason: str


class RequestNode(Effect, frozen=True):
    """Take one node from the pool, none of `avoid`. Answered by NodeGranted or NodeRefused with the same number."""

    request: int
    avoid: tuple[str, ...]
    reason: str


class ReleaseNode(Effect, frozen=True):
    """Give the node of this request back to the pool (node '': withdraw the request, no answer is wanted)."""

    request: int
    node: str
    reason: str


class RetireNode(Effect, frozen=True):
    """Nothing of this job is on this node any more and nothing is to be: end its agent, start none there."""

    node: str
    reason: str


class Tell(Effect, frozen=True):
    """Not an action: something that the people who wait for it should know."""

    text: str


class TakeRung(Effect, frozen=True):
    """Not an action: which rung of the ladder (`core.ladder`) a recovery takes for these ranks (none: all), and why.
    steps_lost: that counted, and have to be done again (None: not known)."""

    rung: str
    ranks: tuple[int, ...]
    reason: str
    steps_lost: int | None = 0


class PublishPlan(Effect, frozen=True):
    plan: Plan


class AnnounceResume(Effect, frozen=True):
    generation: int


class AnnounceComplete(Effect, frozen=True):
    """All steps are done on every rank: whoever is still in the final vote leaves it."""

    generation: int


class StopJob(Effect, frozen=True):
    """The job ends: stop every worker and agent, leave with `exit_code`."""

    reason: str
    exit_code: int


AnyEffect = Union[
    ChangePhase, AnnounceFence, KillWorkers, LaunchWorkers, RequestNode, ReleaseNode, RetireNode, Tell, TakeRung,
    PublishPlan, AnnounceResume, AnnounceComplete, StopJob,
]  # fmt: skip
