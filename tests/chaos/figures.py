"""What a recovery cost, from the time lines in the logs of its ranks.

state_bytes  the largest state of a rank: parameters, buffers, optimizers
form_ms      new process groups, the slowest rank
restore_ms   the state of the slowest target, from its groups on
start_s      from the fault (fired from within) until the last replacement has built its model and reports
total_s      from the fault until the last rank trains again
"""

from __future__ import annotations

import re

from tests.runtime.layouts.outcome import Outcome
from tests.runtime.support import Cluster


def measure(cluster: Cluster, outcome: Outcome) -> dict[str, float]:
    """Those of the figures that this job has to give. Of the last recovery, where there were several."""
    found: dict[str, float] = {}
    if sizes := [result["bytes"] for result in outcome.results.values()]:
        found["state_bytes"] = max(sizes)
    formed = [m for m in cluster.marks("formed") if m["generation"] == str(cluster.generation)]
    received = [m for m in cluster.marks("received") if m["generation"] == str(cluster.generation)]
    reported = [float(m["t"]) for m in cluster.marks("reported") if m["v"] == "-1"]
    resumed = [float(m["t"]) for m in cluster.marks("resumed") if m["generation"] == str(cluster.generation)]
    fired = [float(t) for t in re.findall(r"^fault t=([0-9.]+) at", cluster.whole_logs(), re.MULTILINE)]
    if cluster.generation > 1 and formed and received and resumed and fired:
        found["form_ms"] = max(float(m["build_ms"]) + float(m["swap_ms"]) for m in formed)
        found["restore_ms"] = max(float(m["ms"]) for m in received)
        found["start_s"] = max(reported) - fired[-1]
        found["total_s"] = max(resumed) - fired[-1]
    return found
