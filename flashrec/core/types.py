"""Plain values the core reasons about. Frozen, without behaviour; shared by events, effects and wire messages.

`step` counts optimizer steps: "v = 7" means that seven optimizer steps have been applied to a valid state.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from flashrec.core.ranks import RankSet


class Phase(StrEnum):
    """Phase of the recovery machine; see docs/concepts/recovery.md for the table of transitions."""

    RUNNING = "RUNNING"
    FENCING = "FENCING"
    PLACING = "PLACING"
    FORMING = "FORMING"
    RESTORING = "RESTORING"
    SAVING = "SAVING"  # of what is left, before the end
    RESIZING = "RESIZING"  # the state is put aside for the ranks of another world
    STOPPED = "STOPPED"


class Report(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one worker says about itself after a fence.

    v: optimizer steps applied to a valid state. voted: last step whose vote it entered, passed: last step whose vote
    it saw complete (-1: none). valid: its state is whole, so it may be a source; a joiner and a rank whose optimizer
    step was cut say False. replicas: ranks that hold the same shard, itself included. Only with mirrors: keeps, the
    steps of which its own memory has a complete copy of its state; holds, the same of the ranks whose holder it is.
    unit: so many consecutive ranks hold one whole replica, and rank r the same shard as r - unit and r + unit; rigid:
    why this rank cannot go on in a world of another size ('': it can).
    """

    v: int
    voted: int
    passed: int
    valid: bool
    replicas: RankSet
    keeps: tuple[int, ...] = ()
    holds: dict[int, tuple[int, ...]] = {}
    unit: int = 0
    rigid: str = ""


class Raised(msgspec.Struct, frozen=True, gc=False):
    """An exception that ended a training script. Two equal fingerprints at the same step are a bug, not a fault."""

    step: int
    fingerprint: str
    traceback: str


class Plan(msgspec.Struct, frozen=True, gc=False):
    """The commit decision of one generation. sources: target rank -> source rank. successors: in a planned swap, rank
    -> the incarnation that takes it over; the former life stands by until the resume, and is the source of its own
    successor where `sources` names the rank itself. at_boundary: all ranks have paused at the end of a step.
    savers: nobody goes on; these ranks bring themselves to the resume step and write a checkpoint of it together.
    mirrored: the targets whose source sends the mirror that it holds of them. goes_back: ranks that take their state
    from the copy that they keep themselves. stripes: target rank -> further ranks that send parts of the same state.
    hands_over: another world follows; these ranks bring themselves to the resume step and put their state aside."""

    generation: int
    resume_step: int
    roll_forward: tuple[int, ...]
    sources: dict[int, int]
    reason: str
    successors: dict[int, int] = {}
    at_boundary: bool = False
    savers: tuple[int, ...] = ()
    mirrored: tuple[int, ...] = ()
    goes_back: tuple[int, ...] = ()
    stripes: dict[int, tuple[int, ...]] = {}
    hands_over: tuple[int, ...] = ()


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """One worker to run: which rank, which life of it, for which generation. world_size: of which it is one (0: as the
    agent was told). resized: the generation in which a former world has put its state aside, from which this one
    begins (0: it does not); former: the rank of that world whose state is on this node (-1: none is)."""

    rank: int
    local_rank: int
    incarnation: int
    generation: int
    joins: bool  # True: groups exist elsewhere, so it builds the model alone and is then restored
    world_size: int = 0
    resized: int = 0
    former: int = -1
