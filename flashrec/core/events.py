"""Events: what has happened (past tense). The machine is told nothing else, so the journal is its whole input.

Generation and incarnation identify who speaks: `core.machine` drops stale events in one place (`_is_stale`). What a
worker says about itself travels on the wire as the very event that it is for the machine (`wire.messages`).
"""

from __future__ import annotations

from typing import Union

import msgspec

from flashrec.core.types import Raised, Report


class Event(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of all events; the class name is the tag in the journal. gc: no event can refer to itself, and a search for
    cycles among those of 10,000 ranks takes as long as a fence."""


class JobStarted(Event, frozen=True):
    """nodes: all nodes of the job in order of preference (the batch host last). The first `num_active` get ranks."""

    nodes: tuple[str, ...]
    num_active: int
    ranks_per_node: int


class AgentJoined(Event, frozen=True):
    """An agent has said hello; its node can run workers from now on."""

    node: str
    incarnation: int


class NodeCondemned(Event, frozen=True):
    """A verdict on one life of a node. kind 'link': its agent lives and can kill its workers, but nothing can be
    trained there until NodeMended of the same life. Any other kind ('lost', 'asked', 'slurm'): this life is over."""

    node: str
    incarnation: int
    reason: str
    kind: str = "lost"


class NodesCondemned(Event, frozen=True):
    """Verdicts of the same moment: one failure, not one after the other."""

    verdicts: tuple[NodeCondemned, ...]


class NodeLeaving(Event, frozen=True):
    """Give this node up at a step boundary, as soon as there is another place for its ranks. cause: who says so
    ('drain', 'health', 'asked'); several may, and each takes back only its own word."""

    node: str
    reason: str
    cause: str = "asked"


class NodeMended(Event, frozen=True):
    """What was held against this node is over. cause: 'link' or that of a NodeLeaving; '': all of it. incarnation: the
    life whose link was condemned; the causes of NodeLeaving outlive an agent and look at the node alone."""

    node: str
    incarnation: int
    reason: str
    cause: str = ""


class WorkerStarted(Event, frozen=True):
    """A launched task has been given its rank and is watched by pidfd from now on."""

    rank: int
    incarnation: int
    pid: int


class WorkerJoined(Event, frozen=True):
    """The runtime of a worker has said hello to its agent."""

    rank: int
    incarnation: int


class WorkerExited(Event, frozen=True):
    """farewell: 'finished', 'raised', 'orderly' or 'none'. joined: its runtime had said hello."""

    rank: int
    incarnation: int
    farewell: str
    joined: bool
    reason: str


class WorkerRaised(Event, frozen=True):
    """The training script is about to end with this exception."""

    rank: int
    incarnation: int
    raised: Raised


class WorkerReported(Event, frozen=True):
    """After a fence (or, for a joiner, once its model is built): where this worker stands."""

    rank: int
    incarnation: int
    generation: int
    report: Report


class WorkerFormed(Event, frozen=True):
    """All process groups of this worker are built for `generation`."""

    rank: int
    incarnation: int
    generation: int


class WorkerRestored(Event, frozen=True):
    """This worker holds the state of step v and is ready to resume. moved_bytes: state it received."""

    rank: int
    incarnation: int
    generation: int
    v: int
    moved_bytes: int = 0
    digest: str = ""


class WorkerCommitted(Event, frozen=True):
    """First optimizer step done since joining or resuming: the job makes progress."""

    rank: int
    incarnation: int
    generation: int
    v: int


class CheckpointKept(Event, frozen=True):
    """This worker has hooks for checkpoints, and a complete one of `step` is in place (-1: none). how: 'found' (at the
    start of its life), 'saved', 'dying'. took_s: to write it, or to load it."""

    rank: int
    incarnation: int
    generation: int
    step: int
    how: str
    took_s: float = 0.0


class CheckpointFailed(Event, frozen=True):
    """This worker was to write a dying checkpoint and could not."""

    rank: int
    incarnation: int
    generation: int
    step: int
    reason: str


class HandedOver(Event, frozen=True):
    """This worker has put its state of step v aside, for a life in a world of another size."""

    rank: int
    incarnation: int
    generation: int
    v: int
    num_bytes: int = 0


class NotHandedOver(Event, frozen=True):
    """This worker was to put its state aside and could not."""

    rank: int
    incarnation: int
    generation: int
    reason: str


class NotInherited(Event, frozen=True):
    """This worker was to go on from what a former world has put aside, and not all of that is there or fits."""

    rank: int
    incarnation: int
    generation: int
    reason: str


class WorkerFinished(Event, frozen=True):
    """The worker has left its step loop after the final vote: every rank has done all steps."""

    rank: int
    incarnation: int
    v: int


class TrainingStalled(Event, frozen=True):
    """All ranks wait in the same collective: nobody is lost and nobody is to blame, but it will not end."""

    reason: str


class LaunchFailed(Event, frozen=True):
    """A job step could not start these workers: (rank, incarnation) pairs on one node."""

    node: str
    workers: tuple[tuple[int, int], ...]
    reason: str


class NodeGranted(Event, frozen=True):
    """The pool gave a node. It is the job's now; its agent joins as any other."""

    request: int
    node: str


class NodeRefused(Event, frozen=True):
    """may_retry False: the pool's answer is no. True: the request still stands, and `reason` is why it takes long."""

    request: int
    reason: str
    may_retry: bool


class NodeLeft(Event, frozen=True):
    """A node from the pool is not the job's any more, or no agent can be started on it."""

    request: int
    node: str
    reason: str


class StopRequested(Event, frozen=True):
    reason: str
    exit_code: int


class TimePassed(Event, frozen=True):
    """A deadline of the machine has come; `now` is the argument of `handle`."""


AnyEvent = Union[
    JobStarted, AgentJoined, NodeCondemned, NodesCondemned, NodeLeaving, NodeMended, WorkerStarted, WorkerJoined,
    WorkerExited, WorkerRaised, WorkerReported, WorkerFormed, WorkerRestored, WorkerCommitted, CheckpointKept,
    CheckpointFailed, HandedOver, NotHandedOver, NotInherited,
    WorkerFinished, TrainingStalled, LaunchFailed, NodeGranted, NodeRefused, NodeLeft, StopRequested, TimePassed,
]  # fmt: skip
