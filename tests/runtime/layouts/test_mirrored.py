"""Mirrors: a rank whose shard nobody else has is restored from its holder, wherever it is hit, bit by bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashrec.core import events
from tests.runtime.layouts import program
from tests.runtime.layouts.layout import TABLE
from tests.runtime.layouts.test_layouts import Results, assert_same, undisturbed
from tests.runtime.support import TIMEOUT_S, Cluster

__all__ = ["undisturbed"]
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("layout", "victim", "step", "place", "resume", "goes_back"),
    [
        ("fsdp2", 1, 0, "forward", 0, ()),  # the very first state is mirrored before training begins
        ("fsdp2", 1, 3, "shipping", 2, (0,)),  # half of the state of step 3 has left: step 2 once more, for everybody
        ("zero1", 2, 3, "amid-optimizer", 3, ()),
        ("zero1", 0, 3, "shipping", 2, (1, 2)),
        ("pp", 0, 0, "micro-2", 0, ()),
        ("pp", 1, 3, "micro-3", 3, ()),
        ("pp", 1, 3, "shipping", 2, (0,)),
    ],
)
def test_a_killed_rank_is_restored_from_its_mirror(
    layout: str,
    victim: int,
    step: int,
    place: str,
    resume: int,
    goes_back: tuple[int, ...],
    make_cluster: Callable[..., Cluster],
    undisturbed: Callable[[str], Results],
) -> None:
    cluster = make_cluster(TABLE[layout].world_size)
    config = {"layout": f"{layout}_mirrored", "faults": [(victim, 1, step, place)]}
    cluster.start_all(program.train, **config)
    assert cluster.await_exit(victim) == -signal.SIGKILL, cluster.logs()
    cluster.replace(victim, program=program.train, **config)
    cluster.await_end()
    assert f"at {step} {place}" in cluster.log(victim)
    assert_same(cluster.results(), undisturbed(layout))
    (plan,) = cluster.plans
    assert (plan.resume_step, plan.mirrored, plan.goes_back) == (resume, (victim,), goes_back)
    assert plan.sources == {victim: (victim + 1) % cluster.world_size}
    assert len(cluster.marks("went_back")) == len(goes_back)


def test_a_holder_that_dies_while_it_receives_costs_nothing_but_its_own_restore(
    make_cluster: Callable[..., Cluster], undisturbed: Callable[[str], Results]
) -> None:
    """Its own mirror is elsewhere; the rank that was sending to it begins again with its next life, and trains on."""
    cluster = make_cluster(2)
    config = {"layout": "fsdp2_mirrored", "faults": [(0, 1, 3, "holding"), (1, 1, 4, "backward")]}
    cluster.start_all(program.train, **config)
    for victim in (0, 1):
        assert cluster.await_exit(victim) == -signal.SIGKILL, cluster.logs()
        cluster.replace(victim, program=program.train, **config)
    cluster.await_end()
    assert_same(cluster.results(), undisturbed("fsdp2"))
    assert [plan.sources for plan in cluster.plans] == [{0: 1}, {1: 0}]
    assert [plan.mirrored for plan in cluster.plans] == [(0,), (1,)]


def await_stop(cluster: Cluster, rank: int) -> None:
    """Until SIGSTOP has stopped it."""
    stat = Path(f"/proc/{cluster.processes[rank].pid}/stat")
    deadline = time.monotonic() + TIMEOUT_S
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.02)


def test_a_planned_swap_redoes_nothing_and_the_successor_is_mirrored(
    make_cluster: Callable[..., Cluster], undisturbed: Callable[[str], Results]
) -> None:
    """The worker that is given up sends its own state; when its successor is lost, that comes from the mirror."""
    cluster = make_cluster(2)
    later = {"layout": "fsdp2_mirrored", "faults": [(1, 2, 4, "backward")]}
    cluster.start_all(program.train, layout="fsdp2_mirrored", faults=[(0, 1, 2, "stop-forward")])
    await_stop(cluster, 0)
    cluster.start_successor(1, program.train, **later)
    cluster.pause()
    os.kill(cluster.processes[0].pid, signal.SIGCONT)
    assert cluster.await_exit(1) == -signal.SIGKILL, cluster.logs()
    cluster.replace(1, program=program.train, **later)
    cluster.await_end()
    swap, loss = cluster.plans
    assert (swap.resume_step, swap.successors, swap.sources, swap.mirrored) == (3, {1: 2}, {1: 1}, ())
    assert (loss.resume_step, loss.sources, loss.mirrored) == (4, {1: 0}, (1,))
    assert_same(cluster.results(), undisturbed("fsdp2"))


def test_a_rank_that_is_lost_with_its_holder_is_refused(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(3)
    config = {"layout": "zero1_mirrored", "faults": [(1, 1, 2, "backward"), (2, 1, 2, "backward")]}
    cluster.start_all(program.train, **config)
    for victim in (1, 2):
        assert cluster.await_exit(victim) == -signal.SIGKILL, cluster.logs()
    cluster.replace(1, 2, program=program.train, **config)
    for rank in range(3):
        cluster.await_message(events.WorkerReported, rank=rank, generation=2)
    (refusal,) = cluster.refusals
    assert refusal.ranks == (1,) and "no mirror of that step" in refusal.reason


def test_a_job_on_one_node_is_refused_at_its_start(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(2, FLASHREC_NODE="n1")
    cluster.start_all(program.train, layout="fsdp2_mirrored")
    assert [cluster.await_exit(rank) for rank in range(2)] == [1, 1]
    assert "all ranks are on one node (n1): run on two or more nodes, or say mirrors='process'" in cluster.log(0)
