"""The column for whole nodes: a layout as a real Slurm job with a spare node, one node of which loses its power.

The victim stands still before the vote of a step until its node is without power (`flashrec.testing`), so the cut is
seen to have hit there. A spare takes over; what the ranks leave is compared with the undisturbed run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from flashrec.devcluster.cluster import DevCluster
from flashrec.testing import Fault
from tests.chaos.draw import STEPS
from tests.chaos.play import Result
from tests.e2e.cluster_job import NodeJob
from tests.matrix.table import POWER_CUT
from tests.runtime.layouts.layout import Layout
from tests.runtime.layouts.outcome import Outcome, undisturbed
from tests.support.cluster import dev_cluster, free_all, shared_folder

SCRIPT = Path(__file__).resolve().parents[1] / "runtime/layouts/script.py"
VICTIM, STEP = 1, 3
MAX_NODES = 4  # with ranks


def cut_each(layouts: Sequence[Layout], kept: Path) -> dict[str, dict[str, Result]]:
    """One job for each layout that is protected, one after the other on one cluster. kept: for what went wrong."""
    found: dict[str, dict[str, Result]] = {layout.name: {} for layout in layouts}
    with dev_cluster(num_nodes=MAX_NODES + 1, slurmd_timeout_s=3600) as cluster, shared_folder() as folder:
        for layout in layouts:
            if not layout.is_protected:
                continue
            found[layout.name][POWER_CUT] = result = cut(cluster, folder / layout.name, layout)
            print(f"{layout.name:20} {POWER_CUT} {result.verdict} {result.why} {result.seconds:.0f} s", flush=True)
            if result.log:
                (kept / f"{layout.name}.log").write_text(result.log)
    return found


def cut(cluster: DevCluster, folder: Path, layout: Layout) -> Result:
    """One cell. The job is gone from Slurm afterwards, and every node is whole again."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flashrec-undisturbed-") as cache:
        wanted = undisturbed(layout.name, layout.world_size, STEPS, Path(cache))
    per_node = 1 if layout.world_size <= MAX_NODES else 2
    nodes = layout.world_size // per_node
    job = NodeJob(
        cluster, folder, "job", nodes=nodes + 1, spares=1, per_node=per_node, steps=STEPS,
        train=f"{SCRIPT} --layout {layout.name}",
        faults=(Fault("cut", rank=VICTIM, step=STEP, place="before-vote", kind="request"),),
    )  # fmt: skip
    why, log = "", ""
    try:
        node = job.hit("cut", cluster.cut_power)
        job.finish(None)
        differences = Outcome(job.out, layout.world_size).differences(wanted)
        if node == job.nodes[-1]:
            differences.append("the batch host was hit, not a node with ranks")
        if not job.journal.resumes():
            differences.append("nothing was recovered")
        why = "; ".join(differences)
    except (AssertionError, TimeoutError) as err:
        why = str(err).splitlines()[0][:200]
        log = str(err)
    finally:
        if why:
            log += job.submitted.output.read_text(errors="replace") if job.submitted.output.exists() else ""
        job.close()
        free_all(cluster)
    return Result("wrong" if why else "right", why, num_losses=1, seconds=time.monotonic() - began, log=log)
