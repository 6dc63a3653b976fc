"""How a worker begins and ends: leases, fences before the first step, last words, growth over many recoveries."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashrec.core import events
from flashrec.runtime.control import FENCED_EXIT_CODE
from flashrec.wire import messages as m
from tests.runtime import programs

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]


def test_twenty_generations_leave_nothing_behind(make_cluster, engine: str) -> None:
    cluster = make_cluster(3, FLASHREC_ENGINE=engine)
    cluster.start_all(programs.endless)
    sizes = []
    for generation in range(1, 23):
        cluster.await_message(events.WorkerCommitted, count=3, generation=generation)
        sizes.append(_footprint(cluster))
        if generation < 22:
            cluster.fence()
    early, deadline = sizes[4], time.monotonic() + 10
    while not _is_like(early, late := _footprint(cluster)) and time.monotonic() < deadline:
        time.sleep(0.1)  # old backends are dropped in the background, which nothing announces
    assert _is_like(early, late), (early, late)


def _is_like(early: list[tuple[int, int, int]], late: list[tuple[int, int, int]]) -> bool:
    """No growth with the number of generations. One backend (3 threads, 5 descriptors) may still be there: when gloo
    loses an operation that nobody waits for, its backend goes only with the group's time-out. The allocator's arenas
    vary by some MiB from run to run."""
    return all(
        more_threads <= threads + 4 and more_descriptors <= descriptors + 7 and more_kilobytes <= kilobytes + 8192
        for (threads, descriptors, kilobytes), (more_threads, more_descriptors, more_kilobytes) in zip(
            early, late, strict=True
        )
    )


def _footprint(cluster) -> list[tuple[int, int, int]]:
    """Threads, descriptors and resident KiB of each rank."""
    found = []
    for process in cluster.processes.values():
        proc = Path(f"/proc/{process.pid}")
        pages = int((proc / "statm").read_text().split()[1])
        found.append((len(os.listdir(proc / "task")), len(os.listdir(proc / "fd")), pages * 4))
    return found


def test_a_collective_that_does_not_end_gives_the_rank_up(make_cluster) -> None:
    cluster = make_cluster(3)
    cluster.start_all(programs.deaf)
    while "fault" not in cluster.log(1):
        os.sched_yield()
    cluster.fence()
    for rank in (0, 2):
        assert cluster.await_exit(rank, 10) == FENCED_EXIT_CODE
        assert "did not end within 1 s after the fence" in cluster.log(rank)


def test_a_long_computation_is_not_taken_for_stuck(make_cluster) -> None:
    cluster = make_cluster(2)
    cluster.start_all(programs.busy)
    cluster.await_message(events.WorkerCommitted, count=2)
    cluster.fence()
    cluster.await_end()


def test_an_agent_that_is_gone_ends_the_worker(make_cluster) -> None:
    cluster = make_cluster(2)
    cluster.start_all(programs.endless)
    cluster.await_message(events.WorkerCommitted, count=2)
    (link,) = (link for (rank, _), link in cluster._links.items() if rank == 0)
    link.shutdown(socket.SHUT_RDWR)
    assert cluster.await_exit(0, 10) == FENCED_EXIT_CODE
    assert "the agent of this node is gone" in cluster.log(0)


def test_a_silent_agent_ends_the_worker_after_the_lease(make_cluster) -> None:
    cluster = make_cluster(2, lease_s=0.6)
    cluster.start_all(programs.endless)
    cluster.await_message(events.WorkerCommitted, count=2)
    cluster.beats = False
    assert cluster.await_exit(0, 10) == FENCED_EXIT_CODE
    assert "no sign of life from the agent of this node for 0.6 s" in cluster.log(0)


def test_stop_ends_the_worker(make_cluster) -> None:
    cluster = make_cluster(2)
    cluster.start_all(programs.endless)
    cluster.await_message(events.WorkerCommitted, count=2)
    cluster.send_all(m.Stop("enough"))
    assert cluster.await_exit(0, 10) == 0
    assert "stopped: enough" in cluster.log(0)


def test_a_wrong_secret_is_refused(make_cluster) -> None:
    cluster = make_cluster(1)
    (cluster.path / "secret").write_text("ab" * 32)
    cluster.start_all(programs.endless)
    assert cluster.await_exit(0, 20) == 1
    assert "HandshakeRefused" in cluster.log(0)


def test_a_fence_before_the_first_step_waits_for_the_restart(make_cluster) -> None:
    """Neither the fence nor the dead peer may make this worker speak of a bug: the manager restarts everybody."""
    cluster = make_cluster(3)
    cluster.start_all(programs.wait_before_steps)
    for rank in range(3):
        while "formed" not in cluster.log(rank):
            assert cluster.processes[rank].is_alive()
            os.sched_yield()
    cluster.processes[1].kill()  # rank 0 receives from it: its collective fails
    cluster.await_exit(1)
    cluster.fence()
    while "waiting to be restarted" not in cluster.log(0):
        assert cluster.processes[0].is_alive()
        os.sched_yield()
    assert not cluster.at(events.WorkerRaised) and not cluster.at(events.WorkerReported)
    assert cluster.processes[2].is_alive()


def test_a_bug_goes_through_at_once_and_is_told(make_cluster) -> None:
    cluster = make_cluster(3)
    began = time.monotonic()
    cluster.start_all(programs.train, faults=[(rank, 1, 2, "raise") for rank in range(3)])
    found = [cluster.await_message(events.WorkerRaised, rank=rank).raised for rank in range(3)]
    assert time.monotonic() - began < 10
    assert {raised.step for raised in found} == {2}
    assert len({raised.fingerprint for raised in found}) == 1
    assert found[0].fingerprint.startswith("ValueError: bug at step # @ ")
    assert "ValueError: bug at step 2" in found[0].traceback
    assert [cluster.await_exit(rank) for rank in range(3)] == [1, 1, 1]
    assert not cluster.at(events.WorkerReported)


def test_a_lost_peer_without_a_fence_is_an_error_after_a_while(make_cluster) -> None:
    cluster = make_cluster(2)
    cluster.start_all(programs.train, faults=[(1, 1, 2, "forward")], limits={"fence_timeout_s": 1.0})
    raised = cluster.await_message(events.WorkerRaised, rank=0).raised
    assert "gloo" in raised.traceback
    assert "no failure was announced within 1 s" in cluster.log(0)
    blame = cluster.await_message(m.PeersBlamed, rank=0)
    assert (blame.addresses, blame.generation) == (("127.0.0.1",), 1), "gloo names the peer, and we pass that on"


def test_connections_that_are_not_recognised_are_an_error_at_the_start(make_cluster) -> None:
    cluster = make_cluster(2)
    cluster.start_all(programs.blind)
    raised = cluster.await_message(events.WorkerRaised, rank=0).raised
    assert raised.fingerprint.startswith("NotUnblockable: group # has # ranks, but only # of its #")


def test_a_real_interpreter_says_farewell(make_cluster, tmp_path) -> None:
    """No fork server here: a script, its atexit and its excepthook as users have them."""
    cluster = make_cluster(1)
    script = tmp_path / "script.py"
    script.write_text("import flashrec\nflashrec.init()\nraise LookupError('at 0x7f00, try 17')\n")
    cluster.incarnation[0] = 1
    env = os.environ | cluster.environment(0, joins=False)
    command = [sys.executable, script]
    done = subprocess.run(command, check=False, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "LookupError" in done.stderr and not done.stdout
    raised = cluster.await_message(events.WorkerRaised, rank=0).raised
    assert raised.fingerprint.startswith("LookupError: at #, try # @ ")
    cluster.await_message(m.WorkerFarewell, rank=0)


def test_a_forked_child_says_nothing(make_cluster) -> None:
    cluster = make_cluster(1)
    cluster.start_all(programs.fork_a_child)
    cluster.await_message(events.WorkerFinished)
    assert cluster.await_exit(0) == 0
    assert len(cluster.at(m.WorkerFarewell)) == 1 and not cluster.at(events.WorkerRaised)


def test_import_is_cheap() -> None:
    code = "import flashrec, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, timeout=60).returncode == 0


def test_sigterm_is_left_to_the_script(make_cluster) -> None:
    cluster = make_cluster(1)
    cluster.start_all(programs.endless)
    cluster.await_message(events.WorkerCommitted)
    cluster.processes[0].terminate()
    assert cluster.await_exit(0) == -signal.SIGTERM
