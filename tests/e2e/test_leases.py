"""What cannot be reached ends by itself: the workers of a stopped agent, and what one of them was about to commit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.support import LocalJob

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("committer.py")


class Checkpoint(threading.Thread):
    """Reads the file all the time; `seen` is every content it had, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path, self.seen, self.over = path, [], threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.002):
            if self._path.exists():
                step, life = map(int, self._path.read_text().split())
                if not self.seen or self.seen[-1] != (step, life):
                    self.seen.append((step, life))


def state(pid: int) -> str:
    """State letter of a process; '' if there is none (a zombie does nothing any more)."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if letter in "ZX" else letter


def until(condition, what: str, job: LocalJob, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}\n{job.output()[-3000:]}"
        time.sleep(0.02)


def test_a_stopped_agent_finds_its_workers_gone_and_no_checkpoint_goes_back(local_job, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    job = local_job(command=[sys.executable, str(SCRIPT), str(folder)], settings=["control.lease_s=9"])
    until((folder / "checkpoint").exists, "the first checkpoint", job)
    checkpoint = Checkpoint(folder / "checkpoint")
    (folder / "hold").touch()
    until((folder / "held").exists, "rank 0 holds a draft", job)
    agent, workers = job.agent_pid("local0"), [job.worker_pid(0), job.worker_pid(1)]
    os.kill(agent, signal.SIGSTOP)
    try:
        log = job.job_dir / "logs/rank-0.1.log"
        until(lambda: job.journal.resumes() == 1, "the job goes on with a spare", job)
        assert {slot["node"] for slot in job.journal.events("AgentJoined")} == {"local0", "local1", "local2"}
        until(lambda: any(life == 2 for _, life in checkpoint.seen), "a checkpoint of the second life", job)
        until(lambda: not any(map(state, workers)), "the end of the workers that nobody reaches", job)
        assert state(agent) == "T", "it was the lease that ended them, not their agent"
        said = log.read_text()
        assert "no sign of life from the agent of this node for 9 s" in said
        # its lease may end while it asks
        assert "True" not in said.partition("life 1 asks")[2], "a former life may commit nothing"
    finally:
        os.kill(agent, signal.SIGCONT)
    until(
        lambda: any(e["node"] == "local0" and e["incarnation"] == 2 for e in job.journal.events("AgentJoined")),
        "the node is offered again", job,
    )  # fmt: skip
    assert not any(map(state, workers))
    checkpoint.over.set()
    checkpoint.join()
    assert checkpoint.seen == sorted(checkpoint.seen), "a checkpoint was replaced by an older one"
    granted = [line["step"] for line in job.journal.lines() if line.get("what") == "commit granted"]
    assert granted == sorted(granted) and len(granted) >= 2
