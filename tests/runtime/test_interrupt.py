"""Survivors that wait in Python: reached by a fence where the step can be done again, left alone everywhere else."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from flashrec.runtime import interrupt
from flashrec.runtime.board import Board
from flashrec.runtime.control import FENCED_EXIT_CODE
from flashrec.runtime.interrupt import Interrupter, signal_of
from flashrec.runtime.limits import Limits
from flashrec.runtime.progress import Progress
from tests.runtime import waiting

pytestmark = pytest.mark.torch


def await_word(cluster: Any, rank: int, word: str) -> None:
    while word not in cluster.log(rank):
        assert cluster.processes[rank].is_alive(), cluster.logs()
        time.sleep(0.01)


def test_whoever_waits_in_python_is_reached(make_cluster) -> None:
    kinds = ["event", "lock", "queue", "sleeps", "subprocess", "stubborn", "victim"]
    undisturbed, cluster = make_cluster(7), make_cluster(7)
    undisturbed.start_all(waiting.wait, kinds=[], victim=-1, at=-1)
    cluster.start_all(waiting.wait, kinds=kinds, victim=6)
    assert cluster.await_exit(6) == -signal.SIGKILL, cluster.logs()
    cluster.replace(6, program=waiting.wait, kinds=kinds, victim=6)
    cluster.await_end()
    undisturbed.await_end()
    found, wanted = cluster.results(), undisturbed.results()
    for rank in range(6):
        assert "fault: waits" in cluster.log(rank), f"rank {rank} did not wait"
        assert found[rank]["redone"] == 1, f"rank {rank}"
    assert all(found[rank]["digest"] == wanted[rank]["digest"] for rank in wanted)


def test_a_loader_whose_worker_stands_still_is_left_and_begins_again(make_cluster) -> None:
    cluster = make_cluster(2)
    config = {"kinds": ["event", "victim"], "victim": 1, "loader_of": 0}
    cluster.start_all(waiting.wait, **config)
    await_word(cluster, 0, "fault: asks")
    while not (cluster.path / "stalled").exists():
        time.sleep(0.01)
    cluster.processes[1].kill()
    cluster.await_exit(1)
    cluster.replace(1, program=waiting.wait, **config)
    await_word(cluster, 0, "fault: waits")  # it has got its batch at last, and waits in the next thing
    cluster.processes[1].kill()
    cluster.await_exit(1)
    cluster.replace(1, program=waiting.wait, **config)
    cluster.await_end()
    assert cluster.results()[0]["seen"] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("place", ["optimizer", "committed", "between", "ours", "computing"])
def test_where_the_step_could_be_torn_nothing_is_interrupted(make_cluster, place: str) -> None:
    cluster = make_cluster(2)
    cluster.start_all(waiting.leave_alone, place=place)
    await_word(cluster, 0, "fault: stands still")
    cluster.fence()
    cluster.await_end()
    result = cluster.results()
    assert result[0]["places"] == [place, "gone on"]
    assert result[0]["digest"] == result[1]["digest"]


def test_what_goes_on_after_the_signal_gives_the_rank_up(make_cluster) -> None:
    cluster = make_cluster(2)
    cluster.start_all(waiting.deaf)
    await_word(cluster, 0, "fault: waits")
    cluster.fence()
    assert cluster.await_exit(0, 20) == FENCED_EXIT_CODE
    assert "the main thread did not leave system call" in cluster.log(0)
    assert "within 1.5 s after the fence of generation 2" in cluster.log(0)


def test_that_the_signal_wakes_it_for_a_moment_does_not_start_its_time_again(monkeypatch) -> None:
    woken: list[float] = []
    given_up: list[str] = []
    limits = Limits(interrupt_after_s=0.2, interrupt_timeout_s=1.0)
    interrupter = Interrupter(
        Board(0, False), Progress(rank=0, incarnation=1, generation=0), limits, given_up.append, None
    )
    monkeypatch.setattr(interrupter, "_number", signal.SIGUSR2)
    monkeypatch.setattr(interrupter, "_has_handler", lambda: True)
    monkeypatch.setattr(interrupter, "may_interrupt", lambda: True)
    monkeypatch.setattr(interrupter, "_state", lambda: "S")

    def call() -> str:
        is_awake = woken and time.monotonic() - woken[-1] < 0.05
        return "" if is_awake else "202 0x7f00"

    monkeypatch.setattr(interrupter, "_call", call)
    monkeypatch.setattr(signal, "pthread_kill", lambda *_: woken.append(time.monotonic()))
    interrupter.on_fence(1)
    deadline = time.monotonic() + 10
    while not given_up and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(woken) > 2
    assert "did not leave system call 202 (state S) within 1 s" in given_up[0]


def test_a_signal_of_the_script_is_not_taken(make_cluster) -> None:
    number = signal_of(interrupt.DEFAULT_SIGNAL)
    cluster = make_cluster(1)
    cluster.start(waiting.with_handler, 0, number=number)
    assert cluster.await_exit(0) == 1
    assert f"signal {number} has a handler already" in cluster.log(0)
    assert "FLASHREC_INTERRUPT_SIGNAL" in cluster.log(0)
    other = make_cluster(2, FLASHREC_INTERRUPT_SIGNAL="SIGUSR2")
    other.start_all(waiting.wait, kinds=["event", "victim"], victim=1)
    assert other.await_exit(1) == -signal.SIGKILL
    other.replace(1, program=waiting.wait, kinds=["event", "victim"], victim=1)
    other.await_end()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("SIGUSR2", signal.SIGUSR2),
        ("SIGRTMAX-4", signal.SIGRTMAX - 4),
        ("SIGRTMIN+2", signal.SIGRTMIN + 2),
        ("40", 40),
        ("none", None),
    ],
)
def test_names_of_signals(name: str, number: int | None) -> None:
    assert signal_of(name) == number


@pytest.mark.parametrize("name", ["", "SIGNONE", "SIGUSR", "USR2", "0", "65", "SIGRTMAX-x", "-"])
def test_names_of_no_signal(name: str) -> None:
    with pytest.raises(ValueError, match="signal"):
        signal_of(name)
