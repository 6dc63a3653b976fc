"""A fence at a step boundary, real processes and real gloo: all ranks pause together and no step is done twice.

Rank 0 stops in a step, so the others wait for it there; the fence is announced; then rank 0 goes on.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashrec.core import commit, events
from flashrec.core.types import Report
from flashrec.wire import messages as m
from tests.runtime import programs
from tests.runtime.support import TIMEOUT_S, Cluster
from tests.runtime.test_recovery import assert_same

pytestmark = pytest.mark.torch


def start_held(cluster: Cluster, step: int, **config: Any) -> dict[str, Any]:
    """All ranks train; returns when rank 0 has stopped in `step`."""
    config["faults"] = [(0, 1, step, "stop-forward"), *config.get("faults", ())]
    cluster.start_all(programs.train, **config)
    status = Path(f"/proc/{cluster.processes[0].pid}/stat")
    deadline = time.monotonic() + TIMEOUT_S
    while status.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.02)
    return config


def go_on(cluster: Cluster) -> None:
    os.kill(cluster.processes[0].pid, signal.SIGCONT)


def sole_holders(generation: int, reports: dict[int, Report], former: dict[int, Report]) -> Any:
    """As if no rank had a replica."""
    alone = [
        {rank: msgspec.structs.replace(said, replicas=(rank,)) for rank, said in each.items()}
        for each in (reports, former)
    ]
    return commit.decide(generation, *alone)


@pytest.mark.parametrize("how", ["plain", "no replica", "step skipped by the scaler"])
def test_a_swap_redoes_nothing_and_a_later_failure_is_recovered_from(make_cluster, undisturbed, how: str) -> None:
    cluster = make_cluster(3)
    use_scaler = how == "step skipped by the scaler"
    if how == "no replica":
        cluster.decide = sole_holders
    held = start_held(cluster, 2, use_scaler=use_scaler)
    later = {"use_scaler": use_scaler, "faults": [(1, 2, 4, "backward")]}
    cluster.start_successor(1, programs.train, **later)
    cluster.pause()
    go_on(cluster)
    assert cluster.await_exit(1) == -signal.SIGKILL, cluster.logs()
    swap = cluster.plans[0]
    assert (swap.resume_step, swap.roll_forward, swap.successors) == (3, (), {1: 2})
    assert swap.sources == ({1: 1} if how == "no replica" else {1: 0})
    assert sorted(mark["v"] for mark in cluster.marks("paused")) == ["3", "3", "3"]
    assert not cluster.marks("caught"), "nobody was cut"
    cluster.decide = commit.decide
    cluster.replace(1, program=programs.train, **held)
    cluster.await_end()
    results = cluster.results()
    assert_same(results, undisturbed(use_scaler=use_scaler))
    assert [results[rank]["redone"] for rank in (0, 2)] == [1, 1], "the killed rank's step, not the swapped one's"


def test_a_rank_that_hears_of_the_pause_only_in_the_vote_waits_for_its_fence(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    config = start_held(cluster, 2)
    cluster.start_successor(1, programs.train, **config)
    cluster.pause(without=2)
    go_on(cluster)
    for rank in (0, 1):
        cluster.await_message(events.WorkerReported, rank=rank, generation=2, incarnation=1)
    assert not cluster.at(events.WorkerReported, rank=2, generation=2)
    cluster.send(2, m.Fence(2, "swap", at_boundary=True))
    cluster.await_end()
    assert_same(cluster.results(), undisturbed())
    assert [result["redone"] for result in cluster.results().values()] == [0, 0, 0]


def test_a_failure_before_the_pause_supersedes_it(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    config = start_held(cluster, 2)
    cluster.pause()
    cluster.processes[2].kill()
    cluster.await_exit(2)
    cluster.replace(2, program=programs.train, **config)
    go_on(cluster)
    cluster.await_end()
    assert [plan.generation for plan in cluster.plans] == [3]
    assert not cluster.marks("paused")
    assert_same(cluster.results(), undisturbed())


def test_a_failure_in_the_pause_finds_everybody_at_the_boundary(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    config = start_held(cluster, 2)
    cluster.start_successor(1, programs.train, **config)
    cluster.pause()
    cluster.withheld = "restore/"
    go_on(cluster)
    cluster.await_message(m.KeyPosted, rank=1, group="restore/1")
    cluster.withheld = "-"
    former = cluster.retired[1]
    cluster.processes[1].kill()
    cluster.await_exit(1)
    cluster.processes[1] = former  # it stood by, and goes on
    cluster.fence()
    cluster.await_end()
    assert [plan.resume_step for plan in cluster.plans] == [3, 3]
    assert_same(cluster.results(), undisturbed())
    assert [result["redone"] for result in cluster.results().values()] == [0, 0, 0]


def test_after_the_last_step_nobody_pauses(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    config = start_held(cluster, 5)
    cluster.start_successor(1, programs.train, **config)
    former = cluster.retired[1]
    cluster.pause()
    go_on(cluster)
    for rank in range(3):
        cluster.await_message(events.WorkerFinished, rank=rank)
    cluster.send(1, m.Complete(cluster.generation))
    assert cluster.await_exit(1) == 0, "the successor leaves in good order"
    cluster.processes[1] = former
    cluster.await_end()
    assert not cluster.plans and not cluster.marks("paused")
    assert_same(cluster.results(), undisturbed())
