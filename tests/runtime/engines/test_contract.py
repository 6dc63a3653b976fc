"""What `flashrec.runtime.engine.Engine` promises, for each engine that this torch offers."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from flashrec.core import events
from flashrec.runtime.torch_private import reconfigure
from flashrec.wire import messages as m
from tests.runtime import programs as training
from tests.runtime.engines import kinds, programs

pytestmark = pytest.mark.torch
WORLD_SIZE = programs.WORLD_SIZE


@pytest.fixture
def cluster(make_cluster: Any, engine: str) -> Any:
    return make_cluster(WORLD_SIZE, FLASHREC_ENGINE=engine)


def formed_again(cluster: Any) -> list[dict[str, str]]:
    """How ranks that stayed have formed their groups again."""
    return [mark for mark in cluster.marks("formed") if mark["rank"] != "3" and mark["generation"] != "1"]


def assert_ran_with(cluster: Any, engine: str) -> None:
    assert {mark["engine"] for mark in cluster.marks("started")} == {engine}


def test_groups_work_in_every_generation_and_keep_their_handles(cluster: Any, engine: str) -> None:
    """Three fences; with the third one rank 3, which has stopped, is replaced."""
    cluster.start_all(programs.use_everything)
    for generation in (1, 2):
        cluster.await_message(events.WorkerCommitted, count=WORLD_SIZE, generation=generation)
        cluster.fence()
    cluster.await_message(events.WorkerCommitted, count=WORLD_SIZE, generation=3)
    (cluster.path / "stop").write_text("")
    while "fault" not in cluster.log(3):
        assert cluster.processes[3].is_alive(), cluster.logs()
        time.sleep(0.01)
    os.kill(cluster.processes[3].pid, signal.SIGKILL)
    cluster.await_exit(3)
    cluster.replace(3, program=programs.use_everything)
    cluster.await_message(events.WorkerCommitted, count=WORLD_SIZE, generation=4)
    (cluster.path / "enough").write_text("")
    for rank in range(WORLD_SIZE):
        cluster.await_exit(rank)
    assert_ran_with(cluster, engine)
    formed = formed_again(cluster)
    assert len(formed) >= 6 and all(int(mark["groups"]) >= 5 for mark in formed)
    assert all(mark["replaced"] == ("0" if engine == "native" else mark["groups"]) for mark in formed), formed
    results = cluster.results()
    assert [result["wrong"] for result in results.values()] == [[]] * WORLD_SIZE, cluster.logs()
    assert [results[rank]["generations"] for rank in (0, 1, 2)] == [[1, 2, 3, 4]] * 3
    assert results[3]["generations"] == [4]
    assert results[0]["graphs"] == 1
    assert all(result["same"] for result in results.values())


def test_every_kind_of_collective_ends_with_a_fence_and_later_ones_raise_at_once(cluster: Any, engine: str) -> None:
    cluster.start_all(programs.wait_in_each)
    for generation in range(1, len(kinds.KINDS) + 2):
        for rank in range(WORLD_SIZE):
            while f"fault: generation {generation}\n" not in cluster.log(rank):
                assert cluster.processes[rank].is_alive(), cluster.logs()
                time.sleep(0.005)
        time.sleep(0.05)  # they are in the collective now, or about to
        cluster.fence()
    cluster.await_end()
    assert_ran_with(cluster, engine)
    for rank, result in cluster.results().items():
        later = [seconds for name, found in result["cut"].items() if name.startswith("later") for seconds in found]
        assert len(later) >= 6 and max(later) < 1.0, (rank, result["cut"])
    cut = {name for result in cluster.results().values() for name in result["cut"] if not name.startswith("later")}
    assert cut == {kind.__name__ for kind in kinds.KINDS}


def test_groups_under_construction_are_given_up_for_a_newer_generation(cluster: Any, engine: str) -> None:
    """Twice the replacement stops when its address is known: its peers connect to somebody who never answers."""
    config = {"faults": [(1, 1, 3, "backward")], "num_groups": 2, "limits": {"connect_timeout_s": 55.0}}
    cluster.start_all(training.train, **config)
    cluster.await_exit(1)
    stopped, survivors = [], (0, 2, 3)
    try:
        for generation in (2, 3):
            cluster.replace(1, program=programs.stop_when_known, **config)
            stopped.append(cluster.processes[1])
            while cluster.log(1).count("fault: stops") < len(stopped):
                time.sleep(0.01)
            time.sleep(0.3)
            assert len(cluster.at(events.WorkerFormed, generation=generation)) < len(survivors)
        cluster.replace(1, program=training.train, **config)
        cluster.await_message(events.WorkerFormed, count=WORLD_SIZE, generation=4)
        began = min(cluster.at(m.KeyPosted, rank=1, generation=4))
        assert max(cluster.at(events.WorkerFormed, generation=4)) - began < 20  # nobody has waited for the stopped ones
        cluster.await_end()
    finally:
        for process in stopped:
            process.kill()
    assert_ran_with(cluster, engine)
    assert len({result["digest"] for result in cluster.results().values()}) == 1


@pytest.mark.skipif(not reconfigure.is_there(), reason="this torch has no native engine")
def test_a_backend_in_which_an_operation_is_left_is_not_used_again(make_cluster: Any) -> None:
    cluster = make_cluster(2, FLASHREC_ENGINE="native")
    cluster.start_all(programs.never_idle)
    cluster.await_message(events.WorkerCommitted, count=2, generation=1)
    cluster.fence()
    cluster.await_message(events.WorkerCommitted, count=2, generation=2)
    assert {mark["replaced"] for mark in cluster.marks("formed")} == {"1"}
    assert "an older operation has not ended, so backends are replaced" in cluster.log(0)
