"""How often the manager looks at all ranks on its own account (status, hangs): not so often that it costs much."""

from __future__ import annotations

MAX_SHARE = 0.05  # of one core, for each of them


def rest_s(interval_s: float, took_s: float) -> float:
    """How long to rest after a look that took `took_s` of CPU: `interval_s`, or longer where jobs are so large that
    looks at that interval would take more than MAX_SHARE of a core."""
    return max(interval_s, took_s / MAX_SHARE - took_s)
