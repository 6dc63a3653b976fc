"""Thresholds of the core, with defaults and bounds. The configuration file extends these structs, so a default is
written once. All times are in seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=366 * 86400)]  # neither .nan nor .inf: a limit has to end
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When silence becomes a verdict (`core.detection`). docs/reference/detection.md says how each was chosen."""

    suspect_after_s: Seconds = 1.0  # silence on a path before others are asked to look
    hasten_after_s: Seconds = 1.5  # silence that is enough when others cannot reach the node either
    dead_after_s: Seconds = 2.0
    probed_patience_s: Seconds = 4.0  # added while the node is known to live: others reach it, or MPI heartbeats come
    fabric_dead_after_s: Seconds = 1.6  # no MPI heartbeat while the control path answers
    doubt_s: Seconds = 8.0  # patience added when more than max_condemned nodes fall silent together
    max_condemned: Positive = 2
    probe_peers: Count = 3  # how many other nodes are asked to look; 0: none
    probe_interval_s: Seconds = 1.0  # how often they are asked while the doubt lasts
    blame_window_s: Seconds = 5.0  # workers' connection errors that count together
    tick_interval_s: Seconds = 0.1


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one recovery (`core.machine`)."""

    start_timeout_s: Seconds = 120.0  # agents of all active nodes have joined
    fence_timeout_s: Seconds = 60.0  # survivors have reported; who has not by then is replaced
    launch_timeout_s: Seconds = 600.0  # joiners have built their model and reported
    form_timeout_s: Seconds = 60.0
    restore_timeout_s: Seconds = 600.0
    spare_wait_s: Seconds = 30.0  # wait for a node to come back when no spare is left
    swap_retry_s: Seconds = 60.0  # a leaving node for which the pool had no other: ask again
    max_in_place: Count = 3  # process failures on one node before it counts as unhealthy
    max_without_progress: Positive = 5  # failures in a row without one new optimizer step
    max_loads: Count = 3  # times in a row that all ranks go back to the same checkpoint
    save_timeout_s: Seconds = 600.0  # survivors have written a checkpoint before the job ends
    shrink: Literal["never", "replica_groups"] = "never"  # without a node for lost ranks: go on with fewer
    min_replicas: Positive = 1  # never with fewer replicas than these
    max_resizes: Count = 10  # in the life of a job; the last one is kept for a loss
    resize_interval_s: Seconds = 300.0  # after a resize, before the world grows again


class HangLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When standing still becomes a verdict (`core.hangs`), and who counts as slow."""

    floor_s: Seconds = 2.25  # nobody is found hung sooner; heartbeats and the look add up to 0.75 s
    factor: Annotated[float, Meta(ge=1.5, le=1000)] = 3.0  # times a recent step, or what the fastest peer needed
    min_steps: Positive = 3  # steps that must have been seen before it is known how long one takes
    first_step_s: Seconds = 600.0  # first steps of a life, until it is known how long they take
    between_s: Seconds = 300.0  # between steps: checkpoints, evaluations and logs belong there
    quiet_max_s: Annotated[float, Meta(ge=0, le=366 * 86400)] = 3600.0  # session.quiet(...); 0: no bound
    all_wait_s: Seconds = 60.0  # all ranks wait in the same collective
    straggler_factor: Annotated[float, Meta(gt=1, le=1000)] = 1.3  # busy time to that of the others
    straggler_after_s: Seconds = 30.0  # length of a window; two in a row decide


class PoolLimits(msgspec.Struct, frozen=True):
    """Nodes that this job may take from a pool (`core.pool`). max_swaps 0: none; wait_s: after asking for one."""

    max_swaps: int = 0
    wait_s: float = 0.0
