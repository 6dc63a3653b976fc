"""Hot spares on real processes, without Slurm: replacements come out of parked processes, no bit differs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from flashrec.testing import Fault
from tests.e2e.support import (
    LocalJob,
    assert_at_most_one_step_redone,
    assert_identical,
    assert_no_process,
    kill_node,
    processes_with,
)

pytestmark = pytest.mark.torch
STEPS = 10
HOT = ("hot.park=imports", "hot.after_s=0.1", "hangs.enabled=false")  # a victim waits until there is somebody parked
PAIR = {"nodes": 3, "spares": 1, "per_node": 1, "steps": STEPS}


def notes(job: LocalJob, what: str) -> list[dict]:
    return [line for line in job.journal.lines() if line.get("what") == what]


def await_parked(job: LocalJob, count: int) -> None:
    job.journal.wait_for(lambda: len(notes(job, "parked")) >= count, f"{count} parked tasks", 120)


def kill(job: LocalJob, fault: str, *pids: int) -> None:
    now = time.monotonic()
    kill_node(pids[0], pids[1:])
    job.faults.mark_fired(fault, now)


def cold(job: LocalJob) -> int:
    """How many job steps were started for workers."""
    return len(list((job.job_dir / "logs").glob("step-*.log")))


@pytest.fixture(scope="module")
def undisturbed_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = LocalJob(tmp_path_factory.mktemp("undisturbed"), **PAIR)
    try:
        assert job.wait() == 0, job.output()
    finally:
        job.close()
    return job.out


@pytest.mark.parametrize("how", ["imports", "script"])
def test_a_process_and_then_its_node_are_replaced_by_parked_ones(how: str, local_job, undisturbed_pair: Path) -> None:
    faults = [Fault("process", 1, "backward", "request", step=3), Fault("node", 1, "backward", "request", step=6)]
    job = local_job(faults=faults, settings=(*HOT, f"hot.park={how}"), **PAIR)
    job.faults.await_armed("process", 120)
    await_parked(job, 3)
    kill(job, "process", job.worker_pid(1))
    job.faults.await_armed("node", 60)
    kill(job, "node", job.agent_pid("local1"), job.worker_pid(1))
    assert job.wait() == 0, job.output()[-4000:]
    assert_identical(undisturbed_pair, job.out)
    assert_at_most_one_step_redone(job.job_dir, recoveries=2)
    assert [(note["node"], note["rank"]) for note in notes(job, "parked task used")] == [("local1", 1), ("local2", 1)]
    assert cold(job) == 1, "only the first start"
    assert_no_process(str(job.folder))


def test_a_parked_process_that_dies_costs_nothing_but_its_head_start(local_job, undisturbed_pair: Path) -> None:
    job = local_job(faults=[Fault("process", 1, "backward", "request", step=3)], settings=HOT, **PAIR)
    job.faults.await_armed("process", 120)
    await_parked(job, 3)
    for pid, line in processes_with(str(job.folder)).items():
        if "flashrec.agent.park" in line:
            os.kill(pid, signal.SIGKILL)
    job.journal.wait_for(lambda: len(notes(job, "parked task lost")) == 3, "the end of three parked tasks", 30)
    kill(job, "process", job.worker_pid(1))
    assert job.wait() == 0, job.output()[-4000:]
    assert_identical(undisturbed_pair, job.out)
    assert cold(job) == 2 and not notes(job, "parked task used")


def test_a_script_that_sets_what_torch_reads_when_it_is_loaded_is_not_parked(local_job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport sys, time\nimport flashrec\nflashrec.init()\n"
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nimport torch\n"
        "model = torch.nn.Linear(2, 2)\nddp = torch.nn.parallel.DistributedDataParallel(model)\n"
        "optimizer = torch.optim.SGD(ddp.parameters(), 0.1)\nsession = flashrec.Session(ddp, optimizer)\n"
        "for step in session.steps(20):\n    with step:\n        ddp(torch.ones(2)).sum().backward()\n"
        "        optimizer.step()\n        optimizer.zero_grad()\n        time.sleep(0.1)\n"
    )
    job = local_job(command=[sys.executable, str(script)], settings=HOT, **PAIR)
    assert job.wait() == 0, job.output()[-4000:]
    (off,) = notes(job, "parking is off")
    assert "the script sets OMP_NUM_THREADS, which a parked process reads before" in off["why"]
    assert not notes(job, "parked")
