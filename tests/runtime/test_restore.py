"""A restore of a large state in a job of three replicas: two of them send, and nobody needs a second copy of it."""

from __future__ import annotations

import signal

import pytest

from tests.runtime import large, support

pytestmark = pytest.mark.torch
support.PRELOAD.append("tests.runtime.large")


def test_two_replicas_send_and_no_rank_holds_the_state_twice(make_cluster) -> None:
    cluster = make_cluster(3)
    faults = [(2, 1, 3, "forward")]
    cluster.start_all(large.train, faults=faults)
    assert cluster.await_exit(2) == -signal.SIGKILL, cluster.logs()
    cluster.replace(2, program=large.train, faults=faults)
    cluster.await_end()
    assert (cluster.plans[0].sources, cluster.plans[0].stripes) == ({2: 0}, {2: (1,)})
    sent = {int(mark["rank"]): int(mark["bytes"]) for mark in cluster.marks("sent")}
    assert sent.keys() == {0, 1} and min(sent.values()) > 0
    assert [int(mark["bytes"]) for mark in cluster.marks("received")] == [sum(sent.values())]
    found = cluster.results()
    assert found[0]["digest"] == found[1]["digest"] == found[2]["digest"]
    assert found[2]["losses"]["4"] == found[0]["losses"]["4"]
    normal = max(found[rank]["peaks"]["3"] for rank in (0, 1))
    for rank, result in found.items():
        peak = result["peaks"][str(large.STEPS)]
        assert peak < 1.1 * normal, f"rank {rank}: {peak / 1e6:.0f} MB, in training {normal / 1e6:.0f} MB"


def test_a_further_source_that_is_lost_amid_the_transfer_is_replaced(make_cluster) -> None:
    cluster = make_cluster(3)
    config = {"faults": [(2, 1, 3, "forward"), (1, 1, -1, "sending")]}
    cluster.start_all(large.train, **config)
    assert cluster.await_exit(2) == -signal.SIGKILL, cluster.logs()
    cluster.replace(2, program=large.train, **config)
    assert cluster.await_exit(1) == -signal.SIGKILL, cluster.logs()
    cluster.replace(1, program=large.train, **config)
    cluster.await_end()
    assert "at -1 sending" in cluster.log(1)
    assert [plan.sources for plan in cluster.plans] == [{2: 0}, {1: 0, 2: 0}]
    found = cluster.results()
    assert found[0]["digest"] == found[1]["digest"] == found[2]["digest"]
