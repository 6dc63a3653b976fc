"""All kinds of state that a step changes, bit by bit, in one job."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime import everything
from tests.runtime.support import Cluster

pytestmark = pytest.mark.torch


def test_everything_that_a_step_changes_comes_back(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Both ranks are lost, one before its vote in the step after a skipped one, one after its update."""
    undisturbed = make_cluster(2)
    undisturbed.start_all(everything.train)
    cluster = make_cluster(2)
    config = {"faults": [(1, 1, 3, "before-vote"), (0, 1, 5, "after-optimizer")]}
    cluster.start_all(everything.train, **config)
    for victim in (1, 0):
        assert cluster.await_exit(victim) == -signal.SIGKILL, cluster.logs()
        cluster.replace(victim, program=everything.train, **config)
    cluster.await_end()
    undisturbed.await_end()
    for rank, wanted in undisturbed.results().items():
        found = cluster.results()[rank]
        assert (wanted["life"], found["life"]) == ("1", "2")
        for step, item in found["steps"].items():
            assert item == wanted["steps"][step], f"rank {rank} step {step}"
        assert found["digests"] == wanted["digests"]
        assert found["generators"] == wanted["generators"]
    assert [plan.resume_step for plan in cluster.plans] == [3, 6]
    log = undisturbed.log(0)
    assert "state['of-rank'] of rank 0 is not that of rank 1" in log
    assert log.count("is not that of rank") == 1, "all else is alike"
