"""Real workers put their state aside for a world of another size: which step it is, what was done before, and what not.

What becomes of it is in tests/e2e/test_local_resize.py.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from flashrec.core import commit, events
from flashrec.core.types import Report
from flashrec.runtime.errors import RecoveryFailed
from flashrec.runtime.handover import Handover
from flashrec.runtime.session import _rigid
from flashrec.runtime.update import Update
from flashrec.transport.paths import memory_directory, state_path
from flashrec.wire import messages as m
from tests.runtime import handing
from tests.runtime.support import Cluster

pytestmark = pytest.mark.torch
LEFT = (1, 2)


@pytest.fixture
def memory(make_cluster) -> Any:
    """A cluster of three ranks, and where they put their state aside. Nothing of it is left."""
    cluster = make_cluster(3)
    place = memory_directory(cluster.path / "agent")
    yield cluster, place
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def lose_rank_0(cluster: Cluster) -> dict[int, Report]:
    """Returns what the others report."""
    cluster.await_exit(0)
    cluster.condemn(0)
    generation = cluster.generation
    return {r: cluster.await_message(events.WorkerReported, rank=r, generation=generation).report for r in LEFT}


def put_aside(cluster: Cluster, reports: dict[int, Report], **changes: int) -> None:
    plan = commit.decide(cluster.generation, reports | {0: Report(-1, -1, -1, False, ())})
    assert not isinstance(plan, commit.Impossible) and plan.resume_step == 5
    cluster.send_all(m.PlanPublished(msgspec.structs.replace(plan, sources={}, hands_over=LEFT, **changes)))


def test_survivors_put_the_resume_step_aside_after_all_that_counts_is_told(memory) -> None:
    cluster, place = memory
    cluster.start_all(handing.train)
    reports = lose_rank_0(cluster)
    assert {(report.v, report.unit, report.rigid) for report in reports.values()} == {(5, 1, "")}
    put_aside(cluster, reports)
    for rank in LEFT:
        said = cluster.await_message(events.HandedOver, rank=rank)
        path = state_path(cluster.path / "agent", rank, cluster.generation)
        assert (said.v, said.num_bytes) == (5, path.stat().st_size)
        told = [line for line in cluster.log(rank).splitlines() if line.startswith("committed")]
        assert told == [f"committed {step}" for step in range(5)], "also of the step that was cut after its update"
    assert len(list(place.iterdir())) == 2
    assert all(cluster.processes[rank].exitcode is None for rank in LEFT), "they wait for their end"


def test_one_that_cannot_says_so_and_all_go_on(memory) -> None:
    cluster, place = memory
    cluster.start_all(handing.train)
    reports = lose_rank_0(cluster)
    place.touch()  # no directory
    put_aside(cluster, reports)
    for rank in LEFT:
        assert "FileExistsError" in cluster.await_message(events.NotHandedOver, rank=rank).reason
    cluster.fence()
    cluster.start(handing.train, 0, joins=True)
    cluster.await_message(events.WorkerCommitted, count=3, generation=3)


def test_only_the_resume_step_is_put_aside(memory) -> None:
    cluster, place = memory
    cluster.start_all(handing.train)
    put_aside(cluster, lose_rank_0(cluster), resume_step=6)
    for rank in LEFT:
        assert "holds step 5 (valid: True), not 6" in cluster.await_message(events.NotHandedOver, rank=rank).reason
    assert not place.exists()


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([4, 4, -1, -1], {2: 0, 3: 1}),  # replicas of two ranks
        ([-1, 4, 4, 4, -1, 4], {0: 2, 4: 2}),
        ([4, 4, 4, 4], {}),
        ([4, -1, 4, -1], "no rank holds the shard of rank 1"),
        ([4, 4, 5, -1], "the steps that were put aside are [4, 5]"),
        ([-1, -1, -1, -1], "nothing is there"),
    ],
)
def test_all_ranks_find_the_same_sources(told: list[int], found: dict[int, int] | str) -> None:
    def sources_of(rank: int) -> dict[int, int]:
        worker: Any = SimpleNamespace(rank=rank)
        replicas = tuple(range(rank % 2, len(told), 2))
        unused: Any = None
        return Handover(worker, unused, unused, lambda: replicas, lambda: "", torch.device("cpu"), 1)._sources(told)

    for rank in range(len(told)):
        if isinstance(found, str):
            with pytest.raises(RecoveryFailed, match=re.escape(found)):
                sources_of(rank)
        else:
            assert sources_of(rank) == found


def test_a_script_that_says_nothing_of_its_data_is_rigid(memory) -> None:
    cluster, _ = memory
    cluster.start_all(handing.train, resizes=False)
    assert all("neither session.data nor session.on_resize" in r.rigid for r in lose_rank_0(cluster).values())


def test_layouts_that_belong_to_one_world_size_are_rigid() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert _rigid([optimizer], [], has_mirrors=False) == ""
    assert "mirrors" in _rigid([optimizer], [], has_mirrors=True)
    assert "pipeline" in _rigid([optimizer], [object()], has_mirrors=False)
    assert [Update([optimizer], says, lambda: 0, lambda: None).rigid[:16] for says in (False, True)] == [
        "", "optimizer.step()",
    ]  # fmt: skip


def test_zero_is_rigid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrec.runtime.parallel.zero.is_zero", lambda optimizer: True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert "ZeroRedundancyOptimizer" in _rigid([optimizer], [], has_mirrors=False)


def test_nothing_is_looked_for_outside_of_the_memory_of_the_node() -> None:
    path = state_path(Path("/tmp/flashrec-0/key/n1.sock"), 3, 7)
    assert path.parent == memory_directory(Path("/tmp/flashrec-0/key/n1.sock")) and path.name == "rank-3.7"
    assert path.parent.parent == Path("/dev/shm")
    assert memory_directory(Path("/tmp/flashrec-0/key/n2.sock")) != path.parent
