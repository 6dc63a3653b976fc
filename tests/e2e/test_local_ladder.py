"""The last rungs of the ladder, on real processes: all go back to a checkpoint; survivors write one before the end.

Numbers are compared with those of the same script without `flashrec run`, which trains through undisturbed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrec.testing import Fault
from tests.e2e.support import LocalJob, assert_no_process, kill_node, report_of

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("keeper.py")
PYTHON = [sys.executable]
STEPS, RANKS = 9, 2


def said(out: Path) -> dict[tuple[int, int], dict[int, str]]:
    """(rank, step) -> {life: loss}; what stands for the step after the last is the digest at the end."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    for rank in range(RANKS):
        for line in (out / f"rank-{rank}").read_text().splitlines():
            entry = json.loads(line)
            found.setdefault((rank, entry["step"]), {})[entry["life"]] = entry["loss"]
    return found


def losses(found: dict[tuple[int, int], dict[int, str]]) -> dict[tuple[int, int], set[str]]:
    """Without the digests, which differ between layouts."""
    return {key: set(lives.values()) for key, lives in found.items() if key[1] < STEPS}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[int, str]]:
    """Without `flashrec run`, where the hooks work as well. Two replicas."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "out").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    around = {key: value for key, value in os.environ.items() if not key.startswith("FLASHREC")}
    around |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    argv = [*PYTHON, str(SCRIPT), str(folder / "kept"), str(folder / "out"), str(STEPS), "2"]
    around["PYTHONFAULTHANDLER"] = "1"  # should one abort, its stack says where
    logs = [folder / f"log-{rank}" for rank in range(RANKS)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as said_by:
            environment = around | {"RANK": str(rank)}
            ranks.append(subprocess.Popen(argv, env=environment, stdout=said_by, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(200) for process in ranks]
        said_by_all = "\n".join(log.read_text() for log in logs)
        assert min(codes) >= 0, f"plain torch was ended by a signal: {codes}\n{said_by_all}"
        assert codes == [0] * RANKS, said_by_all
    finally:
        for process in ranks:
            process.kill()
    assert kept(folder / "kept") == [6, 9], "the two newest"
    return said(folder / "out")


def kept(folder: Path) -> list[int]:
    """Steps of the complete checkpoints; no draft may be left. (A job may end before an old one is deleted.)"""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".old-"))
    assert all(name.startswith("step-") for name in names), names
    return [int(name.removeprefix("step-")) for name in names]


def start(local_job: Callable[..., LocalJob], folder: Path, number: int, *options: str, **more: Any) -> LocalJob:
    """Two nodes with a rank each, no spare; fault plans as `LocalJob` writes them."""
    (folder / "out").mkdir(exist_ok=True)
    inject = ["-m", "flashrec.testing.inject", str(folder / f"job{number}/faults/plan.json"), "--"]
    script = [str(SCRIPT), str(folder / "kept"), str(folder / "out"), str(STEPS), *options]
    command = [*PYTHON, *(inject if more.get("faults") else []), *script]
    return local_job(command=command, nodes=RANKS, per_node=1, spares=0, **more)


def test_without_a_replica_all_ranks_go_back_to_the_newest_checkpoint(local_job, tmp_path: Path, undisturbed) -> None:
    fault = Fault("lost", 1, "backward", "SIGKILL", step=7)
    job = start(local_job, tmp_path, 0, "1", faults=[fault])
    assert job.wait(300) == 0, job.output()[-4000:]
    job.faults.assert_all_fired(job.plan)
    found = said(tmp_path / "out")
    assert losses(found) == losses(undisturbed), "of every step in every life"
    assert [len(found[0, step]) for step in range(STEPS)] == [1] * 6 + [2] + [1] * 2, "step 6 was done in two lives"
    assert kept(tmp_path / "kept") == [6, 9]
    (recovery,) = report_of(job.job_dir)["recoveries"]
    assert [rung["rung"] for rung in recovery["rungs"]] == ["in place", "checkpoint"]
    assert "from the checkpoint of step 6, steps lost: 1 (time 1 of 3)" in recovery["rungs"][1]["reason"]
    assert "no replica of the shard of rank 1 is left at step 7" in recovery["rungs"][1]["reason"]
    assert_no_process(str(job.folder))


def test_without_a_node_survivors_save_what_they_hold_and_the_next_job_loses_no_step(
    local_job, tmp_path: Path, undisturbed
) -> None:
    """Before that a rank is lost while all save: what it has begun never counts, and all save again. There is no other
    node for it, so the one that failed is used."""
    job = start(
        local_job, tmp_path, 0, "2", "3", faults=[Fault("wait", 1, "backward", "request", step=7)],
        settings=["recovery.spare_wait_s=0.5", "recovery.agent_retry_s=60", "recovery.max_in_place=0"],
    )  # fmt: skip
    job.faults.await_armed("wait", 200)
    kill_node(job.agent_pid("local1"), [job.worker_pid(1)])  # its worker must not do the last steps before it is told
    job.faults.mark_fired("wait", time.monotonic())
    assert job.wait(200) == 75, job.output()[-4000:]
    assert "a checkpoint of step 7 is complete, no step is lost" in job.output().splitlines()[-1]
    cut, last = report_of(job.job_dir)["recoveries"]
    assert ([rung["rung"] for rung in cut["rungs"]], cut["resume_step"]) == (["last resort"], 3)
    assert [rung["rung"] for rung in last["rungs"]] == ["dying checkpoint"]
    assert "rank 0 to write a checkpoint of step 7 within 600 s: no spare is left" in last["rungs"][0]["reason"]
    assert kept(tmp_path / "kept")[-2:] == [6, 7]
    assert not list((tmp_path / "kept").rglob("torn"))
    about = json.loads((tmp_path / "kept/step-00000007/about.json").read_text())
    assert (about["how"], about["written_by"], about["world_size"]) == ("dying", [0], RANKS)

    requeued = start(local_job, tmp_path, 1, "2")
    assert requeued.wait(300) == 0, requeued.output()[-4000:]
    assert [e["step"] for e in requeued.journal.events("CheckpointKept") if e["how"] == "found"] == [7]
    found = said(tmp_path / "out")
    assert found.keys() == undisturbed.keys()
    assert {key: set(lives.values()) for key, lives in found.items()} == {
        key: set(lives.values()) for key, lives in undisturbed.items()
    }, "losses of every step, and the state at the end"
