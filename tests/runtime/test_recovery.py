"""Real processes, real gloo: after a failure every loss and the final state have the bits of an undisturbed run."""

from __future__ import annotations

import signal
from typing import Any

import pytest

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
    ],
)
def test_a_killed_rank_is_replaced_bit_by_bit(make_cluster, undisturbed, place: str, step: int, victim: int) -> None:
    cluster = make_cluster(3)
    recover(cluster, [victim], faults=[(victim, 1, step, place)])
    # Rank 0 decides about the buffers; lost with it is only what it did not broadcast.
    assert_same(cluster.results(), undisturbed(), buffers=victim != 0 or place == "backward")
    assert cluster.plans[0].resume_step in (step, step + 1)
