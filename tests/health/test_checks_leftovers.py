"""What is left over, what is not, and what is cleaned: real processes and sockets, a squeue of the test's own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrec.transport.paths import exit_socket_path, socket_path
from tests.health.support import needs_root, run_check, script
from tests.health.test_checks_node import says
from tests.support.cluster import is_gone, wait_for

NOBODY = 65534


class Site:
    """A Slurm that knows jobs 1 (runs) and 2 (has ended), and a folder for sockets."""

    def __init__(self, folder: Path) -> None:
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        self.squeue = script(folder / "squeue", "printf '1|RUNNING\\n2|COMPLETED\\n3|COMPLETING\\n'")
        self.scontrol = script(folder / "scontrol", "printf 'SlurmctldHost[0] = x\\nClusterName             = mine\\n'")

    def check(self, *args: object, proc: Path | None = None) -> dict[str, Any]:
        where: tuple[object, ...] = ("--tmp", self.tmp, "--node", "n1", "--squeue", self.squeue)
        if proc is not None:
            where += ("--proc", proc)
        return run_check("leftovers", *where, "--scontrol", self.scontrol, *args)

    def socket(self, key: str, name: str = "n1.sock", uid: int | None = None) -> Path:
        uid = os.geteuid() if uid is None else uid
        folder = self.tmp / f"flashrec-{uid}" / key
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        kind = socket.SOCK_DGRAM if name.endswith(".exit") else socket.SOCK_STREAM
        with socket.socket(socket.AF_UNIX, kind) as end:
            end.bind(str(path))
        return path


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that looks like a worker of ours."""
    started: list[subprocess.Popen[bytes]] = []

    def run(job: int, *, user: int | None = None, cluster: str = "mine", **env: str) -> subprocess.Popen[bytes]:
        ours = {"FLASHREC_SOCKET": "/x", "SLURM_JOB_ID": str(job), "SLURM_CLUSTER_NAME": cluster, **env}
        started.append(
            subprocess.Popen(["sleep", "600"], env={k: v for k, v in ours.items() if v}, user=user, group=user)
        )
        pid = started[-1].pid
        wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "the worker to run")
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def only(folder: Path, *processes: subprocess.Popen[bytes]) -> Path:
    """A /proc that shows these processes alone: others on this machine may be real ones."""
    proc = folder / "proc"
    proc.mkdir(exist_ok=True)
    for process in processes:
        (proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
    return proc


def test_nothing_is_left(site: Site, tmp_path: Path) -> None:
    """And then Slurm is not asked."""
    site.squeue.unlink()
    assert says(site.check(proc=only(tmp_path)), "ok")


@pytest.mark.parametrize("job", [1, 3])
def test_a_running_job_is_left_alone(site: Site, tmp_path: Path, start: Start, job: int) -> None:
    worker = start(job)
    path = site.socket(f"{job}-0a")
    found = site.check("--clean", proc=only(tmp_path, worker))
    assert says(found, "ok")
    assert found["facts"]["processes"] == 1 and found["facts"]["dead_sockets"] == 1
    assert worker.poll() is None and path.exists()


@pytest.mark.parametrize("job", [2, 77])
def test_a_process_of_an_ended_job_is_reported(site: Site, tmp_path: Path, start: Start, job: int) -> None:
    """Slurm shows job 2 as ended; it does not know job 77 any more."""
    worker = start(job)
    found = site.check(proc=only(tmp_path, worker))
    assert says(found, "fail", f"process {worker.pid} of user {os.geteuid()} is left over from job {job}")
    assert worker.poll() is None


def test_an_agent_is_known_by_its_command(site: Site, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", "-m", "flashrec.agent", "--key", "x"]
    with subprocess.Popen(command, env={"SLURM_JOB_ID": "2", "SLURM_CLUSTER_NAME": "mine"}) as agent:
        try:
            wait_for(lambda: b"flashrec" in Path(f"/proc/{agent.pid}/cmdline").read_bytes(), "the agent to run")
            assert says(site.check(proc=only(tmp_path, agent)), "fail", f"process {agent.pid}")
        finally:
            agent.kill()


def test_processes_that_are_not_ours_are_none_of_our_business(site: Site, tmp_path: Path, start: Start) -> None:
    others = [start(2, FLASHREC_SOCKET=""), start(2, SLURM_JOB_ID=""), start(2, SLURM_JOB_ID="2; rm")]
    assert says(site.check("--clean", proc=only(tmp_path, *others)), "ok")
    assert all(other.poll() is None for other in others)


def test_another_clusters_jobs_are_not_judged(site: Site, tmp_path: Path, start: Start) -> None:
    """Its job 2 may be anything, and that we do not know its job 77 means nothing."""
    workers = [start(2, cluster="other"), start(77, cluster="other"), start(77, cluster="")]
    assert says(site.check("--clean", proc=only(tmp_path, *workers)), "ok")
    assert all(worker.poll() is None for worker in workers)


@needs_root
def test_clean_kills_what_is_left_of_users_and_never_roots(site: Site, tmp_path: Path, start: Start) -> None:
    theirs, ours, running = start(2, user=NOBODY), start(2), start(1, user=NOBODY)
    found = site.check("--clean", proc=only(tmp_path, theirs, ours, running))
    assert says(found, "fail", f"process {theirs.pid} of user {NOBODY} is left over from job 2, killed")
    wait_for(lambda: is_gone(theirs.pid), "the end of the worker")
    assert ours.poll() is None and running.poll() is None


def test_slurm_not_answering_is_unknown_and_nothing_is_cleaned(site: Site, tmp_path: Path, start: Start) -> None:
    worker, path = start(2), site.socket("2-0a")
    for squeue in ("exit 1", "echo garbage", "exec sleep 600", "echo '2|COMPLETED'; exit 1"):
        script(site.squeue, squeue)
        found = site.check("--clean", "--timeout-s", 1, proc=only(tmp_path, worker))
        assert says(found, "unknown", "Slurm could not be asked")
        (tmp_path / "proc" / str(worker.pid)).unlink()
    assert worker.poll() is None and path.exists()
    script(site.squeue, "printf '2|COMPLETED\\n'")
    script(site.scontrol, "echo nothing")
    assert says(site.check("--clean", proc=only(tmp_path, worker)), "unknown", "says no ClusterName")
    assert worker.poll() is None and path.exists()


# ---- sockets


@pytest.mark.parametrize("name", ["n1.sock", "n1.sock.exit"])
def test_a_dead_socket_is_reported_and_removed(site: Site, tmp_path: Path, name: str) -> None:
    path = site.socket("2-0a", name)
    proc = only(tmp_path)
    assert says(site.check(proc=proc), "warn", "1 sockets of jobs that have ended")
    assert path.exists()
    assert says(site.check("--clean", proc=proc), "ok")
    assert not path.parent.exists() and path.parents[1].exists()


def test_the_names_are_those_that_agents_give(site: Site, tmp_path: Path) -> None:
    """The check shares no code with the agent; this holds the two together."""
    path = socket_path("2-0123abcd", "n1", str(site.tmp))
    assert site.socket("2-0123abcd") == path
    assert site.socket("2-0123abcd", "n1.sock.exit") == exit_socket_path(path)
    assert site.check(proc=only(tmp_path))["facts"]["left_sockets"] == 2


def test_a_socket_that_somebody_listens_at_stays(site: Site, tmp_path: Path) -> None:
    path = site.socket("2-0a")
    path.unlink()
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(path))
        agent.listen()
        assert says(site.check("--clean", proc=only(tmp_path)), "ok")
        assert path.exists()


def test_other_nodes_and_other_files_stay(site: Site, tmp_path: Path) -> None:
    kept = [site.socket("2-0a", "n2.sock"), site.socket("local-0a"), site.socket("2-XY")]
    mine = site.socket("2-0b")
    (mine.parent / "notes").write_text("x")
    assert says(site.check("--clean", proc=only(tmp_path)), "ok")
    assert all(path.exists() for path in kept)
    assert not mine.exists() and (mine.parent / "notes").exists()


@needs_root
def test_no_link_leads_root_astray(site: Site, tmp_path: Path) -> None:
    """Folders and sockets that are links, or belong to somebody else than their name says, are passed over."""
    target = site.socket("2-0a", uid=0)
    folder = site.tmp / f"flashrec-{NOBODY}"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    (folder / "2-0b").symlink_to(target.parent)
    inside = folder / "2-0c"
    inside.mkdir()
    os.chown(inside, NOBODY, NOBODY)
    (inside / "n1.sock").symlink_to(target)
    (site.tmp / "flashrec-7").symlink_to(site.tmp / "flashrec-0")
    foreign = site.socket("2-0d", uid=1234)  # root's own folder under another user's name
    found = site.check("--clean", "--node", "n1", proc=only(tmp_path))
    assert found["facts"]["dead_sockets"] == 1 and found["facts"]["removed_sockets"] == 1
    assert not target.exists() and foreign.exists() and (folder / "2-0b").is_symlink()
