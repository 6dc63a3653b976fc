"""Ends and intrusions: bugs in the script, wrong input, strangers on the control port, no spare left. Each is told
clearly, has its exit code, and leaves no process behind.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashrec.testing import Fault
from flashrec.transport.handshake import HandshakeRefused, connect_authenticated, new_secret, read_secret
from flashrec.wire import frames
from flashrec.wire import messages as m
from tests.e2e.support import FLASHREC, SMALL, TRAIN, assert_identical, assert_no_process, kill_node, processes_with

pytestmark = pytest.mark.torch

BUG = """
import torch, flashrec
import torch.distributed as dist
flashrec.init()
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = flashrec.Session(model, optimizer)
for step in session.steps(10):
    with step:
        model(torch.ones(2, 4)).sum().backward()
        if int(step) == 3 and dist.get_rank() in {ranks}:
            raise ValueError("the data is wrong")
        optimizer.step()
        optimizer.zero_grad()
"""

AT_EXIT = """
import atexit, os, runpy, sys

@atexit.register  # first registered, last called
def look():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    print("threads at the end:", *sorted(name for name in names if "gloo" in name), "none", flush=True)

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("ranks", [(2,), (0, 1, 2, 3)], ids=["one rank", "every rank"])
def test_a_bug_is_not_a_fault(ranks: tuple[int, ...], local_job, tmp_path: Path) -> None:
    script = tmp_path / "bug.py"
    script.write_text(BUG.replace("{ranks}", str(ranks)))
    job = local_job(command=[sys.executable, str(script)])
    assert job.wait(90) == 1
    assert "ValueError: the data is wrong" in job.output()
    assert "Traceback" in job.output().split("flashrec: ")[-1], "the traceback is what the job ends with"
    launches = [e for e in job.journal.events("WorkerStarted") if e["rank"] == 2]
    assert len(launches) <= 2, "one retry at most"
    assert_no_process(str(job.folder))


def test_a_script_that_does_not_even_start(local_job, tmp_path: Path) -> None:
    script = tmp_path / "typo.py"
    script.write_text("import flashrecc\n")
    job = local_job(command=[sys.executable, str(script)])
    assert job.wait(60) == 1
    assert "ModuleNotFoundError" in job.output()
    assert len(job.journal.events("WorkerStarted")) == 4, "nothing is started again"


def test_no_thread_of_gloo_lives_when_the_interpreter_ends(local_job, tmp_path: Path) -> None:
    """Such a thread may abort a process that has done all its work, and then a good job ends with exit code 134."""
    script = tmp_path / "at_exit.py"
    script.write_text(AT_EXIT)
    job = local_job(command=[sys.executable, str(script), str(TRAIN), "--steps", "3", *SMALL])
    assert job.wait(90) == 0, job.output()
    said = [line.split("] ")[1] for line in job.output().splitlines() if "threads at the end" in line]
    assert said == ["threads at the end: none"] * 4


def test_no_spare_left_is_a_clear_end(local_job) -> None:
    job = local_job(
        nodes=2, spares=0, faults=[Fault("wait", 2, "backward", "request", step=3)],
        settings=["recovery.spare_wait_s=0.5", "recovery.agent_retry_s=60"],
    )  # fmt: skip
    job.faults.await_armed("wait", 60)
    kill_node(job.agent_pid("local1"), [job.worker_pid(2), job.worker_pid(3)])
    job.faults.mark_fired("wait", time.monotonic())
    assert job.wait(60) == 75
    last = job.output().splitlines()[-1]
    assert "no spare is left for rank 2, 3" in last
    assert "local1" in last
    assert_no_process(str(job.folder))


def test_a_lost_node_that_comes_back_is_the_spare(local_job, undisturbed) -> None:
    job = local_job(nodes=2, spares=0, faults=[Fault("wait", 2, "backward", "request", step=3)])
    job.faults.await_armed("wait", 60)
    kill_node(job.agent_pid("local1"), [job.worker_pid(2), job.worker_pid(3)])
    job.faults.mark_fired("wait", time.monotonic())
    assert job.wait(60) == 0, job.output()[-3000:]
    assert_identical(undisturbed(), job.out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "detection.deadafter_s=3"], "unknown field `deadafter_s`"),
        (["--set", "detection.dead_after_s=0.1"], "suspect_after_s < dead_after_s must hold"),
        (["--set", "spares=many"], "Expected `int"),
        (["--config", "/nonexistent.yaml"], "cannot read /nonexistent.yaml"),
        (["--ntasks-per-node=two"], "'two' is not a count"),
        (["--ntasks", "7"], "7 ranks do not fit 2 active nodes"),
        (["--ntasks=0"], "'0' is not a count"),
        (["--nodelist=n1"], "flashrec places the ranks itself"),
        (["--spares", "3"], "leave 0 for ranks"),
        (["--gpus-per-task=1"], "with --local only"),
    ],
)
def test_wrong_input_is_refused_with_the_remedy(options: list[str], said: str, tmp_path: Path) -> None:
    argv = [*FLASHREC, "run", "--local", "--nodes", "3", *options, "--", "true"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 64, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_without_an_allocation_the_remedy_is_shown(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    done = subprocess.run(
        [*FLASHREC, "run", "--", "true"], cwd=tmp_path, capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 64
    assert "sbatch --nodes=5 --no-kill" in done.stderr
    assert "--local" in done.stderr


def test_strangers_on_the_control_port(local_job, undisturbed) -> None:
    """No secret, a wrong one, garbage, an oversized frame, a wrong message: none has any effect on the job."""
    job = local_job(faults=[Fault("wait", 2, "backward", "request", step=3)])
    job.faults.await_armed("wait", 60)
    address = _manager_address(job)
    secret = read_secret(job.job_dir / "secret")

    with socket.create_connection(address, 5) as sock, pytest.raises(HandshakeRefused):
        connect_authenticated(sock, new_secret(), 5)
    for first in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, os.urandom(4096)):
        with socket.create_connection(address, 5) as sock:
            sock.sendall(first)
            assert _is_closed(sock), "whoever cannot prove the secret is dropped"
    hello = frames.frame(frames.encode(m.AgentHello("local1", 99, 1, "127.0.0.1", "0.1.0")))
    bad_frames = [
        struct.pack("!I", 2**31) + b"x" * 100,
        frames.frame(b"\xc1garbage"),
        frames.frame(frames.encode(m.Stop("from a stranger"))),
        frames.frame(frames.encode(m.AgentHello("nowhere", 1, 1, "", "0.1.0"))),
        frames.frame(frames.encode(m.AgentHello("local1", 1, 1, "", "9.9"))),
        hello,  # a second agent for a node that has one
    ]
    for bad in bad_frames:
        with socket.create_connection(address, 5) as sock:
            connect_authenticated(sock, secret, 5)
            sock.sendall(bad)
            assert _is_closed(sock), f"not refused: {bad[:60]!r}"
    job.faults.mark_fired("wait", time.monotonic())
    assert job.wait(60) == 0, job.output()[-3000:]
    assert job.journal.resumes() == 0, "nobody was disturbed"
    assert_identical(undisturbed(), job.out)
    notes = [line for line in job.journal.lines() if line["kind"] == "note" and "refused" in line["what"]]
    assert len(notes) >= 3 + len(bad_frames), "each is in the journal with its reason"


def test_the_secret_must_be_ours_alone(local_job) -> None:
    job = local_job(steps=100_000)
    job.journal.wait_for(lambda: job.journal.events("WorkerStarted"), "start", 60)
    assert (job.job_dir / "secret").stat().st_mode & 0o777 == 0o600
    (job.job_dir / "secret").chmod(0o644)
    with pytest.raises(PermissionError, match="mode 0600"):
        read_secret(job.job_dir / "secret")
    job.close()
    assert not (job.job_dir / "secret").exists(), "gone with the job"


def test_an_interrupted_job_stops_everything(local_job) -> None:
    job = local_job(steps=100_000)
    job.journal.wait_for(lambda: ("RESTORING", "RUNNING", 1) in job.journal.phases(), "training", 60)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(20) == 128 + signal.SIGTERM
    assert_no_process(str(job.folder))


def _manager_address(job) -> tuple[str, int]:
    line = next(line for line in processes_with(str(job.folder)).values() if "flashrec.agent " in line)
    host, _, port = line.split("--manager ")[1].split()[0].rpartition(":")
    return host, int(port)


def _is_closed(sock: socket.socket) -> bool:
    """Our side sees the end of the connection (or a refusal, then the end) within the time-out."""
    sock.settimeout(15)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True
