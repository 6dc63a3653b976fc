"""Thresholds of the core, with defaults and bounds. The configuration file extends these structs, so a default is
written once. All times are in seconds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=366 * 86400)]  # neither .nan nor .inf: a limit has to end
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When silence becomes a verdict (`core.detection`)."""

    suspect_after_s: Seconds = 1.0
    dead_after_s: Seconds = 2.0
    doubt_s: Seconds = 8.0  # patience added when more than max_condemned nodes fall silent together
    max_condemned: Positive = 2
    tick_interval_s: Seconds = 0.1


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one recovery (`core.machine`)."""

    start_timeout_s: Seconds = 120.0  # agents of all active nodes have joined
    fence_timeout_s: Seconds = 60.0  # survivors have reported; who has not by then is replaced
    launch_timeout_s: Seconds = 600.0  # joiners have built their model and reported
    form_timeout_s: Seconds = 60.0
    restore_timeout_s: Seconds = 600.0
    spare_wait_s: Seconds = 30.0  # wait for a node to come back when no spare is left
    max_in_place: Count = 3  # process failures on one node before it counts as unhealthy
    max_without_progress: Positive = 5  # failures in a row without one new optimizer step


class PoolLimits(msgspec.Struct, frozen=True):
    """Nodes that this job may take from a pool (`core.pool`). max_swaps 0: none; wait_s: after asking for one."""

    max_swaps: int = 0
    wait_s: float = 0.0
