"""The client with fake commands on PATH: what they print, that they hang, that they are missing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrec.slurm.client import SlurmClient
from flashrec.slurm.command import is_outage
from flashrec.slurm.scheduler import JobPlace, SlurmError, SlurmUnavailable

CONTROLLER_GONE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
CAPTURED = [  # stderr of Slurm 22.05 with slurmctld stopped: srun, srun in an allocation, squeue, sinfo, scontrol
    "srun: error: Unable to allocate resources: Unable to contact slurm controller (connect failure)\n",
    "srun: error: Unable to confirm allocation for job 5: Unable to contact slurm controller (connect failure)\n"
    "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 5\n",
    CONTROLLER_GONE + "\n",
    "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n",
    "job script retrieval failed: Unable to contact slurm controller (connect failure)\n",
    "scontrol: error: fetch_config: DNS SRV lookup failed\n"
    "scontrol: fatal: Could not establish a configuration source\n",
]
NO_OUTAGE = [
    "",
    "slurm_load_jobs error: Invalid job id specified\n",
    "srun: error: Unable to create step for job 5: Requested node configuration is not available\n",
    "srun: error: n1: task 3: Killed\n",
    "srun: error: Unable to create step for job 5: Memory required by task is not available\n",
    "srun: error: Unable to confirm allocation for job 7: Invalid job id specified\n",
]
Fake = Callable[..., Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a command of this name on PATH that runs `script` (sh)."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(name: str, script: str) -> Path:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.args\nenv > {tmp_path}/{name}.env\n{script}\n')
        path.chmod(0o755)
        return path

    return make


def ask(call: Callable[[SlurmClient], Any], timeout_s: float = 10.0) -> Any:
    return asyncio.run(asyncio.wait_for(call(SlurmClient(timeout_s)), 30))


@pytest.mark.parametrize("said", CAPTURED)
def test_outages_are_known(said: str) -> None:
    assert is_outage(said)


@pytest.mark.parametrize("said", NO_OUTAGE)
def test_a_refusal_is_no_outage(said: str) -> None:
    assert not is_outage(said)


def test_a_job(fake: Fake) -> None:
    fake("squeue", "echo '7|RUNNING|n[1-3],m7|n1'")
    job = ask(lambda c: c.job(7))
    assert (job.job_id, job.state, set(job.nodes), job.batch_host) == (7, "RUNNING", {"n1", "n2", "n3", "m7"}, "n1")


def test_a_job_of_an_array_is_found_among_its_sisters(fake: Fake, tmp_path: Path) -> None:
    """The id of an array's last task is that of the array, so squeue shows all of them."""
    fake("squeue", "printf '12|RUNNING|n1|n1\\n7|RUNNING|n[2-3]|n2\\n'")
    assert ask(lambda c: c.job(7)).nodes == ("n2", "n3")
    assert "%A" in (tmp_path / "squeue.args").read_text(), "%i prints 7_2 for such a job"


@pytest.mark.parametrize("host", ["n/a", "(null)", ""])
def test_a_job_without_a_batch_host(host: str, fake: Fake) -> None:
    fake("squeue", f"echo '7|RUNNING|n1|{host}'")
    assert ask(lambda c: c.job(7)) == JobPlace(7, "RUNNING", ("n1",), "")


@pytest.mark.parametrize("printed", ["", "8|RUNNING|n1|n1", "garbage", "7|RUNNING|n1", "7|R|n1|n1|x", "7|R|n[1-|n1",
                                     "7|RUNNING|n1|n1\\n7|RUNNING|n2|n2"])  # fmt: skip
def test_what_is_no_answer_about_the_job_is_an_error(printed: str, fake: Fake) -> None:
    fake("squeue", f"printf '{printed}\\n'")
    with pytest.raises(SlurmError) as caught:
        ask(lambda c: c.job(7))
    assert not isinstance(caught.value, SlurmUnavailable)


def test_node_states(fake: Fake) -> None:
    fake("sinfo", "printf 'n1|mixed\\nn1|mixed\\nn2|down*\\nn3|drained\\nn4|allocated+drain\\nn5|idle~\\n'")
    states = ask(lambda c: c.node_states(("n1", "n2", "n3", "n4", "n5")))
    assert states == {
        "n1": {"MIXED"}, "n2": {"DOWN", "NOT_RESPONDING"}, "n3": {"DRAINED", "DRAIN"},
        "n4": {"ALLOCATED", "DRAIN"}, "n5": {"IDLE"},
    }  # fmt: skip


def test_nodes_of_hidden_partitions_are_seen_and_only_fields_without_user_text_are_asked(
    fake: Fake, tmp_path: Path
) -> None:
    fake("sinfo", "echo 'n1|idle'")
    ask(lambda c: c.node_states(("n1",)))
    args = (tmp_path / "sinfo.args").read_text()
    assert "--all" in args
    fake("squeue", "echo '7|RUNNING|n1|n1'")
    ask(lambda c: c.job(7))
    args += (tmp_path / "squeue.args").read_text()
    asked = {word for word in args.replace("|", " ").split() if word.startswith("%")}
    assert asked == {"%N", "%T", "%A", "%B"}, "job name, comment and user name may contain anything"


@pytest.mark.parametrize("printed", ["", "n1|idle"])
def test_a_missing_node_is_an_error_and_not_an_empty_answer(printed: str, fake: Fake) -> None:
    fake("sinfo", f"echo '{printed}'")
    with pytest.raises(SlurmError, match=r"did not show node .*n2"):
        ask(lambda c: c.node_states(("n1", "n2")))
    fake("sinfo", "")
    with pytest.raises(SlurmError, match="did not show node n2"):
        ask(lambda c: c.node_address("n2"))


@pytest.mark.parametrize(
    "call", [lambda c: c.job(7), lambda c: c.node_states(("n1",)), lambda c: c.batch_script(7), lambda c: c.version()]
)
def test_an_outage_is_told_apart_from_an_answer(call, fake: Fake) -> None:
    for name in ("squeue", "sinfo", "scontrol"):
        fake(name, f"echo '{CONTROLLER_GONE}' >&2; exit 1")
    with pytest.raises(SlurmUnavailable, match="Unable to contact"):
        ask(call)


def test_an_outage_with_exit_code_0_is_an_outage(fake: Fake) -> None:
    """scontrol write batch_script ends with 0 when the controller is away."""
    fake("scontrol", f"echo '{CAPTURED[-1].strip()}' >&2; exit 0")
    with pytest.raises(SlurmUnavailable):
        ask(lambda c: c.batch_script(7))


def test_a_refusal_is_an_answer(fake: Fake) -> None:
    fake("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    with pytest.raises(SlurmError, match="Invalid job id") as caught:
        ask(lambda c: c.job(7))
    assert not isinstance(caught.value, SlurmUnavailable)
    fake("scontrol", "echo 'job script retrieval failed: Access/permission denied' >&2; exit 1")
    assert ask(lambda c: c.batch_script(7)) is None


def test_a_command_that_hangs_is_given_up_with_its_children(fake: Fake, tmp_path: Path) -> None:
    fake("squeue", f"sleep 300 & echo $! > {tmp_path}/child; wait")
    started = time.monotonic()
    with pytest.raises(SlurmUnavailable, match=r"did not answer within 0\.5 s"):
        ask(lambda c: c.job(7), timeout_s=0.5)
    assert time.monotonic() - started < 5
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    deadline = time.monotonic() + 5
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "a child of the hung command is left behind"


def test_a_command_that_is_not_there_or_cannot_run(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squeue").write_text("")  # not executable
    monkeypatch.setenv("PATH", str(tmp_path))
    for call in (lambda c: c.job(7), lambda c: c.version()):
        with pytest.raises(SlurmUnavailable, match=r"squeue|sinfo"):
            ask(call)


def test_a_call_that_is_cancelled_leaves_no_process(fake: Fake, tmp_path: Path) -> None:
    fake("squeue", f"echo $$ > {tmp_path}/pid; exec sleep 300")

    async def play() -> None:
        call = asyncio.create_task(SlurmClient().job(7))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        stat = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(play(), 10))


def test_the_environment_cannot_change_the_output(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_FORMAT", "SINFO_FORMAT", "SLURM_TIME_FORMAT", "SQUEUE_STATES", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "forged")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("SLURM_CONF", "/kept")
    fake("squeue", "echo '7|RUNNING|n1|n1'")
    ask(lambda c: c.job(7))
    seen = (tmp_path / "squeue.env").read_text()
    assert "forged" not in seen
    assert "LC_ALL=C\n" in seen
    assert "TZ=UTC0\n" in seen, "times are read as UTC"
    assert "SLURM_CONF=/kept\n" in seen


def test_the_version(fake: Fake) -> None:
    fake("sinfo", "echo 'slurm-wlm 22.05.8'")
    assert ask(lambda c: c.version()) == "22.05.8"


def test_of_an_array_one_task_is_meant(fake: Fake, tmp_path: Path) -> None:
    """Its last task has the array's number: in squeue that is all of them, and scontrol does not change it."""
    fake("squeue", "printf '8|9:59\\n7|5:00\\n'")
    assert ask(lambda c: c.time_left(7)) == "5:00"
    fake("squeue", "printf '8|7_1\\n7|7_2\\n'")
    fake("scontrol", "true")
    ask(lambda c: c.touch(7))
    assert (tmp_path / "scontrol.args").read_text() == "update jobid=7_2 timelimit=+0\n"
    fake("squeue", "echo '8|9:59'")
    with pytest.raises(SlurmError, match="does not show job 7"):
        ask(lambda c: c.time_left(7))


def test_what_a_companion_job_is_to_be_like(fake: Fake, tmp_path: Path) -> None:
    fake("squeue", "echo ' 7|1-02:03:04 '")
    assert ask(lambda c: c.time_left(7)) == "1-02:03:04"
    fake("squeue", "echo '7|0'")
    assert ask(lambda c: c.memory_asked(7)) == "0"
    asked = (tmp_path / "squeue.args").read_text().splitlines()
    assert asked == [f"--noheader --jobs 7 --format %A|{field}" for field in ("%L", "%m")]
    fake("squeue", f"echo '{CONTROLLER_GONE}' >&2; exit 1")
    with pytest.raises(SlurmUnavailable):
        ask(lambda c: c.time_left(7))
