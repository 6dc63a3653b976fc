"""Real processes, real gloo: after a failure every loss and the final state have the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from flashrec.core import events
from flashrec.wire import messages as m
from tests.runtime import programs

pytestmark = pytest.mark.torch


def recover(cluster: Any, victims: list[int], **config: Any) -> None:
    """Run to the end with these victims, each replaced once when it is gone."""
    cluster.start_all(programs.train, **config)
    for victim in victims:
        assert cluster.await_exit(victim) == -signal.SIGKILL, cluster.logs()
        cluster.replace(victim, program=programs.train, **config)
    cluster.await_end()


def assert_same(found: dict[int, Any], wanted: dict[int, Any], *, buffers: bool = True) -> None:
    for rank, result in wanted.items():
        for step, loss in found[rank]["losses"].items():
            assert loss == result["losses"][step], f"rank {rank} step {step}"
        assert found[rank]["digest"] == result["digest"], f"state of rank {rank}"
        if buffers:
            assert found[rank]["full"] == result["full"], f"buffers of rank {rank}"
        assert found[rank]["scaler"] == result["scaler"]
        assert found[rank]["kept"]


@pytest.mark.parametrize(
    ("place", "step", "victim"),
    [
        ("forward", 0, 1),
        ("backward", 0, 0),
        ("before-vote", 0, 2),
        ("forward", 1, 0),
        ("backward", 1, 1),
        ("backward", 3, 2),
        ("backward", 3, 0),
        ("before-vote", 4, 1),
        ("after-optimizer", 3, 1),
        ("between", 2, 1),
        ("between", 2, 0),  # its buffers of step 2 are on all ranks already
    ],
)
def test_a_killed_rank_is_replaced_bit_by_bit(make_cluster, undisturbed, place: str, step: int, victim: int) -> None:
    cluster = make_cluster(3)
    recover(cluster, [victim], faults=[(victim, 1, step, place)])
    assert_same(cluster.results(), undisturbed())
    assert cluster.plans[0].resume_step in (step, step + 1)


@pytest.mark.parametrize("votes_by_collective", [False, True])
def test_steps_done_by_vote_go_on_and_the_others_roll_forward(
    make_cluster, undisturbed, votes_by_collective: bool
) -> None:
    cluster = make_cluster(3)
    faults = [(2, 1, 3, "after-optimizer")]
    recover(cluster, [2], faults=faults, lose_vote=(1, 3), votes_by_collective=votes_by_collective)
    assert (cluster.plans[0].resume_step, cluster.plans[0].roll_forward) == (4, (1,))
    assert "rolling_forward" in cluster.log(1)
    assert_same(cluster.results(), undisturbed())
    assert cluster.results()[1]["redone"] == 0


def test_all_ranks_one_after_another(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    config = {"faults": [(0, 1, 1, "backward"), (1, 1, 2, "backward"), (2, 1, 4, "before-vote")]}
    recover(cluster, [0, 1, 2], **config)
    assert_same(cluster.results(), undisturbed())


def test_two_ranks_at_once(make_cluster, undisturbed) -> None:
    cluster = make_cluster(4)
    config = {"faults": [(1, 1, 3, "backward"), (2, 1, 3, "backward")]}
    cluster.start_all(programs.train, **config)
    for victim in (1, 2):
        cluster.await_exit(victim)
    cluster.replace(1, 2, program=programs.train, **config)
    cluster.await_end()
    assert_same(cluster.results(), undisturbed(4))
    assert set(cluster.plans[0].sources) == {1, 2}


@pytest.mark.parametrize("place", ["init", "join"])
def test_a_replacement_that_dies_is_replaced(make_cluster, undisturbed, place: str) -> None:
    cluster = make_cluster(3)
    recover(cluster, [1, 1], faults=[(1, 1, 3, "backward"), (1, 2, -1, place)])
    assert_same(cluster.results(), undisturbed())


@pytest.mark.parametrize("moment", [m.KeyPosted, events.WorkerFormed])
def test_a_replacement_that_dies_while_it_forms_or_is_restored(make_cluster, undisturbed, moment: type) -> None:
    cluster = make_cluster(3)
    config = {"faults": [(1, 1, 3, "backward")]}
    cluster.start_all(programs.train, **config)
    cluster.await_exit(1)
    cluster.replace(1, program=programs.train, **config)
    cluster.await_message(moment, rank=1, generation=2)
    cluster.processes[1].kill()
    cluster.await_exit(1)
    cluster.replace(1, program=programs.train, **config)
    cluster.await_end()
    assert_same(cluster.results(), undisturbed())


def test_a_fence_reaches_a_target_that_waits_for_its_source(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    cluster.withheld = "restore/"  # so the source does not learn where the target listens
    config = {"faults": [(1, 1, 3, "backward")]}
    cluster.start_all(programs.train, **config)
    cluster.await_exit(1)
    cluster.replace(1, program=programs.train, **config)
    cluster.await_message(m.KeyPosted, rank=1, group="restore/1")
    cluster.withheld = "-"
    cluster.fence()
    for rank in range(3):
        cluster.await_message(events.WorkerReported, rank=rank, generation=3, timeout_s=5)
    cluster.await_end()
    assert_same(cluster.results(), undisturbed())


def test_a_survivor_that_dies_in_the_recovery(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    config = {"faults": [(1, 1, 3, "backward")]}
    cluster.start_all(programs.train, **config)
    cluster.await_exit(1)
    cluster.replace(1, program=programs.train, **config)
    cluster.await_message(events.WorkerReported, rank=0, generation=2)
    cluster.processes[0].kill()
    cluster.await_exit(0)
    cluster.replace(0, program=programs.train, **config)
    cluster.await_end()
    assert_same(cluster.results(), undisturbed())


def test_a_stopped_rank_blocks_nobody_after_the_fence(make_cluster, undisturbed) -> None:
    """The guard here is the shutting of connections: without it survivors wait for gloo's 30 minutes."""
    cluster = make_cluster(4)
    config = {"faults": [(1, 1, 3, "stop-before-vote")]}
    cluster.start_all(programs.train, **config)
    cluster.await_message(events.WorkerCommitted, count=4)
    while "fault" not in cluster.log(1):
        assert cluster.processes[1].is_alive()
        os.sched_yield()
    cluster.fence()
    for rank in (0, 2, 3):
        cluster.await_message(events.WorkerReported, rank=rank, generation=2, timeout_s=5)
    cluster.processes[1].kill()
    cluster.await_exit(1)
    cluster.replace(1, program=programs.train, **config)
    cluster.await_end()
    assert_same(cluster.results(), undisturbed(4))


def test_a_torn_optimizer_step_makes_a_target(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    recover(cluster, [2], faults=[(2, 1, 3, "after-optimizer")], torn=(1, 3))
    assert sorted(cluster.plans[0].sources) == [1, 2]
    assert_same(cluster.results(), undisturbed())


def test_a_collective_after_the_scheduler_is_harmless(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    recover(cluster, [2], faults=[(2, 1, 3, "after-optimizer")], late_reduce="after-scheduler")
    assert cluster.plans[0].resume_step == 4
    assert_same(cluster.results(), undisturbed())


def test_a_collective_before_the_scheduler_tears_and_says_so(make_cluster) -> None:
    cluster = make_cluster(3)
    cluster.start_all(programs.train, faults=[(2, 1, 3, "after-optimizer")], late_reduce="before-scheduler")
    cluster.await_exit(2)
    cluster.fence()
    for rank in (0, 1):
        report = cluster.await_message(events.WorkerReported, rank=rank, generation=2).report
        assert (report.v, report.valid) == (4, False)
    assert "state['scheduler'] was not advanced" in cluster.log(0)
    assert "communicate before optimizer.step()" in cluster.log(0)


@pytest.mark.parametrize("place", ["before-vote", "after-optimizer", "backward"])
@pytest.mark.parametrize("step", [2, 3])
def test_a_step_that_the_scaler_skips(make_cluster, undisturbed, place: str, step: int) -> None:
    cluster = make_cluster(3)
    recover(cluster, [1], faults=[(1, 1, step, place)], use_scaler=True)
    assert_same(cluster.results(), undisturbed(use_scaler=True))


@pytest.mark.parametrize("step", [0, 1, 3])
def test_several_micro_batches_and_gradient_views(make_cluster, undisturbed, step: int) -> None:
    cluster = make_cluster(3)
    config = {"micro_batches": 2, "bucket_view": True, "zero_first": True}
    recover(cluster, [2], faults=[(2, 1, step, "before-vote")], **config)
    assert_same(cluster.results(), undisturbed(**config))


@pytest.mark.parametrize("place", ["between", "after-optimizer"])
def test_a_loss_before_the_final_vote(make_cluster, undisturbed, place: str) -> None:
    cluster = make_cluster(3)
    recover(cluster, [1], faults=[(1, 1, 5, place)])
    assert cluster.plans[0].resume_step == 6
    wanted, found = undisturbed(), cluster.results()
    assert all(found[rank]["digest"] == wanted[rank]["digest"] for rank in wanted)


def test_a_loss_after_the_final_vote_completes(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    config = {"faults": [(2, 1, 6, "after-loop")], "lose_vote": (1, 6)}
    cluster.start_all(programs.train, **config)
    cluster.await_message(events.WorkerFinished, rank=0)
    cluster.await_exit(2)
    cluster.replace(2, program=programs.train, **config)
    cluster.await_end()
    assert "a replacement without state has nothing to do" in cluster.log(2)
    assert not (cluster.path / "rank2.json").exists()
    wanted = undisturbed()[1]
    assert json.loads((cluster.path / "rank1.json").read_text())["digest"] == wanted["digest"]


def test_over_ipv6(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3, address="::1")
    recover(cluster, [1], faults=[(1, 1, 3, "backward")])
    assert_same(cluster.results(), undisturbed())


def test_over_a_chosen_interface(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3, address="127.0.0.9", GLOO_SOCKET_IFNAME="lo")
    recover(cluster, [1], faults=[(1, 1, 3, "backward")])
    assert_same(cluster.results(), undisturbed())


def test_with_fresh_keys(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    recover(cluster, [1, 0], faults=[(1, 1, 2, "backward"), (0, 1, 4, "backward")], fresh_keys=True)
    assert "fresh keys" in cluster.log(0)
    assert_same(cluster.results(), undisturbed())


def test_without_seed_the_survivors_keep_their_random_numbers(make_cluster, undisturbed) -> None:
    cluster = make_cluster(3)
    recover(cluster, [1], faults=[(1, 1, 3, "before-vote")], seed=None)
    found, wanted = cluster.results(), undisturbed(seed=None)
    assert all(found[0]["losses"][str(step)] == wanted[0]["losses"][str(step)] for step in (0, 1, 2, 3))


def test_the_same_numbers_without_flashrec_run(undisturbed, tmp_path) -> None:
    """The script as torchrun would start it, in one process."""
    wanted = undisturbed(1)
    found = undisturbed(1, plain=True)
    assert found[0] == wanted[0] | {key: found[0][key] for key in ("threads", "descriptors")}


def test_all_kinds_of_groups_keep_working(make_cluster) -> None:
    cluster = make_cluster(4)
    cluster.start_all(programs.late_group)
    cluster.await_message(events.WorkerCommitted, count=4, generation=1)
    cluster.fence()
    cluster.await_message(events.WorkerCommitted, count=4, generation=2)
    cluster.await_end()
    assert len(cluster.plans) == 1
    for result in cluster.results().values():
        assert result["same"], result
