"""A node is lost and no other comes: fewer ranks go on, and when it is back the world grows again. On real processes.

What each world does is compared, bit by bit, with a job of that size that was started from the state at that step.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrec.testing import Fault
from tests.e2e.resizes import RESIZER, assert_each_sample_once_an_epoch, numbers, said
from tests.e2e.support import LocalJob, assert_no_process, report_of

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
STEPS, LOST_IN, KILLED_IN = 70, 7, 9
PATIENT = ("detection.worker_silent_s=300",)  # interpreters of a busy machine say nothing while they end
SETTINGS = (
    *PATIENT,
    "recovery.shrink=replica_groups", "recovery.spare_wait_s=0.5", "recovery.resize_interval_s=1",
    "recovery.agent_retry_s=3600",
)  # fmt: skip


def start(
    local_job: Callable[..., LocalJob], folder: Path, layout: str, nodes: int, steps: int = STEPS, **more: Any
) -> LocalJob:
    """Two ranks on each node. Fault plans as `LocalJob` writes them, for its job number 0."""
    inject = ["-m", "flashrec.testing.inject", str(folder.parent / "job0/faults/plan.json"), "--"]
    script = [
        str(RESIZER), "--out", str(folder / "out"), "--kept", str(folder / "kept"), "--layout", layout,
        "--steps", str(steps), "--slow", "0.9", "--full", "4",
    ]  # fmt: skip
    command = [sys.executable, *(inject if more.get("faults") else []), *script]
    return local_job(command=command, nodes=nodes, per_node=2, spares=0, **more)


def bring_back(job: LocalJob, node: str) -> subprocess.Popen[bytes]:
    """Start an agent of `node`, as that of local0 was started."""
    pid = job.agent_pid("local0")
    argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    environ = dict(item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if item)
    with (job.folder / "agent").open("wb") as log:
        return subprocess.Popen(argv, env=environ | {"FLASHREC_NODE": node}, stdout=log, stderr=log)


def await_step(out: Path, step: int) -> None:
    """Until rank 0 has done `step`."""
    deadline = time.monotonic() + 200
    while f'"step": {step},' not in (out / "rank-0").read_text():
        assert time.monotonic() < deadline, f"step {step} is not done"
        time.sleep(0.1)


@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
def test_a_world_shrinks_and_grows_again(local_job, tmp_path: Path, layout: str) -> None:
    """With DDP a rank of the small world is replaced as well, which has to learn where in the data it is."""
    faults = [Fault("wait", 3, "backward", "request", step=LOST_IN)]
    if layout == "ddp":
        faults.append(Fault("kill", 1, "backward", "SIGKILL", step=KILLED_IN))
    job = start(local_job, tmp_path / "resized", layout, 2, faults=faults, settings=SETTINGS)
    job.faults.await_armed("wait", 200)
    os.kill(job.agent_pid("local1"), signal.SIGKILL)
    job.faults.mark_fired("wait", time.monotonic())
    await_step(tmp_path / "resized/out", KILLED_IN + 2)
    agent = bring_back(job, "local1")
    try:
        assert job.wait(300) == 0, job.output()[-4000:]
        assert agent.wait(60) == 0, "told to stop"
    finally:
        agent.kill()
    job.faults.assert_all_fired(job.plan)
    assert_no_process(str(job.folder))
    recoveries = report_of(job.job_dir)["recoveries"]
    shrunk, *replaced, grown = recoveries
    rungs = [rung["rung"] for recovery in recoveries for rung in recovery["rungs"]]
    assert rungs == ["shrink", *["in place"] * (layout == "ddp"), "grow"]
    assert (shrunk["resume_step"], shrunk["steps_redone"], grown["steps_redone"]) == (LOST_IN, 1, 0)

    lines, resizes = said(tmp_path / "resized/out")
    again = grown["resume_step"]
    assert [recovery["resume_step"] for recovery in replaced] == [KILLED_IN] * len(replaced)
    assert {step for (step, _), found in lines.items() if found["world"] == 2} == set(range(LOST_IN, again))
    assert {key: found["resized"] for key, found in resizes.items()} == {
        **{(2, rank): [4, 2] for rank in range(2)}, **{(4, rank): [2, 4] for rank in range(4)},
    }  # fmt: skip
    assert_each_sample_once_an_epoch(lines, STEPS)

    for name, nodes, first, last in (("small", 1, LOST_IN, again), ("large", 2, again, STEPS)):
        kept = f"kept/step-{first:08d}"
        shutil.copytree(tmp_path / "resized" / kept, tmp_path / name / kept)
        alone = start(local_job, tmp_path / name, layout, nodes, last, settings=PATIENT)
        assert alone.wait(200) == 0, alone.output()[-4000:]
        wanted = numbers(said(tmp_path / name / "out")[0], first, last)
        assert wanted and wanted == numbers(lines, first, last), f"the {name} world"
    end = [found["loss"] for (step, _), found in lines.items() if step == STEPS]
    assert end == [found["loss"] for (step, _), found in said(tmp_path / "large/out")[0].items() if step == STEPS]
