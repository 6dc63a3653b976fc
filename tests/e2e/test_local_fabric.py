"""A whole job whose fabric is watched, without Slurm: MPI children are lost, and the job does not notice."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.support import FLASHREC, LocalJob, assert_no_process, processes_with
from tests.support.cluster import is_gone, wait_for

pytestmark = pytest.mark.torch
REQUIRED = ("fabric.mpi=required",)


def children(job: LocalJob, role: str) -> list[int]:
    """Pids of the job's MPI children: those of its agents, or of its manager."""
    parents = {job.process.pid} if role == "hub" else set(processes_with(str(job.job_dir / "secret")))
    return [
        pid for pid in processes_with(f"flashrec.transport.mpi {role}")
        if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in parents
    ]  # fmt: skip


def notes(job: LocalJob, what: str) -> list[dict]:
    return [line for line in job.journal.lines() if line["kind"] == "note" and line["what"] == what]


def test_lost_mpi_children_are_replaced_and_cost_the_job_nothing(local_job: Callable[..., LocalJob]) -> None:
    job = local_job(nodes=3, spares=1, settings=REQUIRED, command=["sh", "-c", "while [ ! -e go ]; do sleep 0.1; done"])

    def sessions(count: int, what: str) -> None:
        job.journal.wait_for(lambda: len(notes(job, "fabric session")) >= count, what, 60)

    sessions(3, "all meet")
    os.kill(children(job, "beater")[0], signal.SIGKILL)
    sessions(4, "the killed beater's successor meets the hub")
    os.kill(children(job, "beater")[0], signal.SIGSTOP)
    sessions(5, "so does that of the stopped one")
    os.kill(children(job, "hub")[0], signal.SIGKILL)
    sessions(8, "all meet the next hub")
    last = [*children(job, "beater"), *children(job, "hub")]
    assert len(last) == 4
    (job.folder / "go").touch()
    assert job.wait() == 0, job.output()
    ended = [line["why"] for line in notes(job, "fabric session ended")]
    assert [why.partition("(")[2] for why in ended] == ["killed by SIGKILL)", "silent for 5 s, killed)"]
    assert [line["why"] for line in notes(job, "fabric hub lost")] == ["killed by SIGKILL"]
    assert "fabric: MPICH 4" in job.output() and "ofi;tcp on lo, 3 nodes" in job.output()
    assert "the MPI hub is replaced: killed by SIGKILL" in job.output()
    assert not [line for line in job.journal.lines() if line["kind"] == "verdict" and line["state"] == "dead"]
    assert_no_process(str(job.job_dir / "secret"))
    wait_for(lambda: all(is_gone(pid) for pid in last), "the end of the MPI children")


def test_a_required_fabric_that_cannot_be_had_starts_no_job(tmp_path: Path) -> None:
    argv = [*FLASHREC, "run", "--local", "--nodes", "2", "--job-dir", str(tmp_path / "job"), "--set", REQUIRED[0],
            "--set", f"fabric.library={tmp_path}/libmpi.so", "--", "true"]  # fmt: skip
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 64
    assert "fabric.mpi is required, and the fabric cannot be watched: mpi4py finds no MPI library" in done.stderr
    assert not list((tmp_path / "job").rglob("agent*"))
