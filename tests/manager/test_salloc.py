"""The command that asks for a companion job: its options, its environment, what it prints."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from flashrec.manager import salloc
from flashrec.manager.salloc import Outcome, Salloc, salloc_argv, salloc_environment
from flashrec.slurm.scheduler import JobInfo

LIMIT_S = 20

JOB = JobInfo(
    7, "RUNNING", ("n1", "n2"), "n1", states=frozenset({"RUNNING"}), user_id=1000, user_name="ada", account="phys",
    partition="gpu", qos="high", name="train", comment="", admin_comment="", reservation="", features="",
    tres_per_node="", tres_requested="cpu=16,mem=20G,node=2,billing=16", num_nodes=2, num_cpus=16, time_limit_s=None,
    submit_time=None, start_time=None, end_time=None, array_job_id=None, array_task_id=None,
)  # fmt: skip


def options(job: JobInfo = JOB, time_left: str = "1-02:03:04", avoid: tuple[str, ...] = (), all_memory=False):
    argv = salloc_argv(job, all_memory, "flashspare", time_left, avoid, 60.5)
    assert argv[:3] == ["salloc", "--no-shell", "--no-kill"]
    return dict(word.removeprefix("--").split("=", 1) for word in argv[3:])


def test_a_companion_is_one_node_like_the_jobs() -> None:
    assert options() == {
        "nodes": "1", "ntasks": "1", "reservation": "flashspare", "job-name": "flashrec-spare-7",
        "comment": "flashrec:spare-for=7", "partition": "gpu", "account": "phys", "qos": "high", "time": "1-02:03:04",
        "immediate": "61", "cpus-per-task": "8", "mem": "10240M",
    }  # fmt: skip


def test_what_slurm_does_not_say_is_not_asked_for() -> None:
    bare = msgspec.structs.replace(
        JOB, account="", qos="", tres_requested="cpu=2,node=2", num_nodes=None, num_cpus=None
    )
    assert set(options(bare, time_left="NOT_SET")) == {
        "nodes", "ntasks", "reservation", "job-name", "comment", "partition", "immediate",
    }  # fmt: skip


def test_nodes_to_avoid() -> None:
    assert options(avoid=("n4", "n5"))["exclude"] == "n4,n5"


@pytest.mark.parametrize(
    ("per_node", "requested", "gres"),
    [
        ("gres:gpu:4", "", "gpu:4"),
        ("gres/gpu:a100:4", "", "gpu:a100:4"),
        ("gres:gpu:2,gres:nic:1", "", "gpu:2,nic:1"),
        ("", "cpu=4,node=2,gres/gpu=8", "gpu:4"),
        ("", "cpu=4,node=2,gres/gpu=8,gres/gpu:a100=8", "gpu:a100:4"),
        ("", "cpu=4,node=2,gres/gpu=1", None),
    ],
)
def test_the_same_gres_as_on_each_node_of_the_job(per_node: str, requested: str, gres: str | None) -> None:
    job = msgspec.structs.replace(JOB, tres_per_node=per_node, tres_requested=requested)
    assert options(job).get("gres") == gres


@pytest.mark.parametrize(
    ("memory", "asked"), [("8000M", "4000M"), ("1T", "524288M"), ("7.79G", "3983M"), ("512K", "1M"), ("?", None)]
)
def test_memory_is_asked_for_in_whole_megabytes_and_never_more_than_there_is(memory: str, asked: str | None) -> None:
    job = msgspec.structs.replace(JOB, tres_requested=f"cpu=4,mem={memory},node=2")
    assert options(job).get("mem") == asked


def test_a_job_that_takes_all_memory_of_its_nodes_takes_all_of_the_next_one() -> None:
    assert options(all_memory=True)["mem"] == "0"
    assert "mem" not in options(msgspec.structs.replace(JOB, tres_requested="cpu=2,node=2"), all_memory=True)


def test_the_environment_says_nothing_of_our_own_job() -> None:
    mine = {
        "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/x", "SALLOC_RESERVATION": "other", "SBATCH_NO_KILL": "1",
        "SLURM_SPANK__SLURM_SPANK_OPTION_flashrec_flashrecovery": "on", "SQUEUE_FORMAT": "%i", "PATH": "/bin",
        "LANG": "de_DE",
    }  # fmt: skip
    made = salloc_environment(mine)
    assert {k: made.get(k) for k in mine} == {
        **dict.fromkeys(mine), "SLURM_CONF": "/etc/x", "PATH": "/bin", "LANG": "de_DE",
    }  # fmt: skip
    assert made["LC_ALL"] == "C" and made["FLASHREC_HANDED_OVER"] == "1"


def run(script: str, timeout_s: float = 10.0, withdraw_at: str = "") -> tuple[Outcome, Salloc, list[str]]:
    """A shell script as salloc. withdraw_at: as soon as it is pending ('pending') or before it runs ('start')."""
    calls: list[str] = []

    async def scene() -> tuple[Outcome, Salloc]:
        def pending() -> None:
            calls.append(f"pending {made.job_id}")
            if withdraw_at == "pending":
                made.withdraw()

        made = Salloc(["sh", "-c", script], os.environ, pending)
        if withdraw_at == "start":
            made.withdraw()
        async with asyncio.timeout(LIMIT_S):
            return await made.run(timeout_s), made

    outcome, made = asyncio.run(scene())
    return outcome, made, calls


def test_granted_at_once() -> None:
    outcome, _, calls = run("echo 'salloc: Granted job allocation 12' >&2; echo 'salloc: Nodes n4 are ready' >&2")
    assert (outcome.is_granted, outcome.job_id, calls) == (True, 12, [])


def test_granted_after_waiting() -> None:
    outcome, made, calls = run(
        "echo 'salloc: Pending job allocation 3' >&2; echo 'salloc: job 3 queued and waiting for resources' >&2;"
        "echo 'salloc: job 3 has been allocated resources' >&2; echo 'salloc: Granted job allocation 3' >&2"
    )
    assert (outcome.is_granted, outcome.job_id, calls, made.was_pending) == (True, 3, ["pending 3"], True)


def test_refused() -> None:
    outcome, made, _ = run("echo 'salloc: error: Job submit/allocate failed: Access denied' >&2; exit 1")
    assert outcome == Outcome(False, None, "Job submit/allocate failed: Access denied")
    assert not made.was_pending


def test_an_allocation_that_failed_after_it_was_granted_is_none() -> None:
    outcome, _, _ = run("echo 'salloc: Granted job allocation 3' >&2; echo 'salloc: error: prolog failed' >&2; exit 1")
    assert outcome == Outcome(False, 3, "prolog failed")


def test_what_a_site_prints_is_not_taken_for_slurms_word() -> None:
    outcome, _, _ = run("echo 'salloc: error: your Granted job allocation 99 quota is used up' >&2; exit 1")
    assert outcome.job_id is None


def test_withdrawn_while_it_waits() -> None:
    script = "trap 'echo salloc: Job aborted due to signal >&2; exit 1' TERM; "
    script += "echo 'salloc: Pending job allocation 3' >&2; while :; do sleep 0.05; done"
    outcome, made, _ = run(script, withdraw_at="pending")
    assert (outcome.is_granted, outcome.job_id, made.was_killed) == (False, 3, False)
    outcome, _, _ = run(script, withdraw_at="start")
    assert not outcome.is_granted


def test_one_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(salloc, "END_TIMEOUT_S", 0.2)
    mark = tmp_path / "pid"
    outcome, made, _ = run(f"trap '' TERM; echo $$ > {mark}; while :; do sleep 0.05; done", timeout_s=0.5)
    assert made.was_killed and not outcome.is_granted
    assert not Path(f"/proc/{mark.read_text().strip()}").exists()
    assert "did not end within 0.5 s" in outcome.said


def test_a_granted_node_is_not_kept_waiting_and_its_salloc_is_not_hurried(tmp_path: Path) -> None:
    """With PrologFlags=Alloc salloc goes on for seconds; ended before, it gives the node back."""
    over = tmp_path / "over"

    async def scene() -> Outcome:
        script = f"echo 'salloc: Granted job allocation 12' >&2; while [ ! -e {over} ]; do sleep 0.02; done"
        made = Salloc(["sh", "-c", script], os.environ, lambda: None)
        async with asyncio.timeout(LIMIT_S):
            running = asyncio.create_task(made.run(0.3))
            await made.granted.wait()
            await asyncio.wait([running], timeout=0.6)
            assert made.job_id == 12 and not running.done()
            over.touch()
            return await running

    assert asyncio.run(scene()) == Outcome(True, 12, "salloc ended with code 0")
