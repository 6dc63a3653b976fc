"""`session.checkpoint()` in real workers: what counts as a checkpoint, and what survivors save without the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashrec.core import commit, events
from flashrec.core.types import Report
from flashrec.runtime.checkpoint_folder import CheckpointFolder
from flashrec.wire import messages as m
from tests.runtime import saving
from tests.runtime.support import Cluster

pytestmark = pytest.mark.torch
SELDOM = 1_000_000


def answer(asked: m.CommitAsked, granted: bool = True) -> m.CommitAnswered:
    return m.CommitAnswered(asked.rank, asked.incarnation, asked.request, granted, "" if granted else "no!", 60.0)


@pytest.fixture
def train(make_cluster, tmp_path: Path) -> Any:
    """Workers that keep checkpoints, and their folder."""

    def start(world_size: int, **config: Any) -> tuple[Cluster, Path]:
        cluster = make_cluster(world_size)
        cluster.permit = answer
        cluster.start_all(saving.keep, **{"folder": str(tmp_path / "kept")} | config)
        return cluster, tmp_path / "kept"

    return start


def digests(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.glob("digest-*")}


def save_what_is_left(cluster: Cluster, lost: int) -> int:
    """What the manager does when a lost rank has no node. Returns the step that is saved."""
    cluster.processes[lost].kill()
    cluster.processes[lost].join(10)
    cluster.condemn(lost)
    generation = cluster.generation
    left = [rank for rank in range(cluster.world_size) if rank != lost]
    said = [cluster.await_message(events.WorkerReported, rank=rank, generation=generation) for rank in left]
    reports = {message.rank: message.report for message in said} | {lost: Report(-1, -1, -1, False, ())}
    plan = commit.decide(generation, reports)
    assert not isinstance(plan, commit.Impossible)
    plan = msgspec.structs.replace(plan, sources={}, savers=tuple(left))
    cluster.send_all(m.PlanPublished(plan))
    return plan.resume_step


def test_survivors_save_together_and_go_on_when_a_node_comes(train) -> None:
    cluster, folder = train(4, every=SELDOM)
    cluster.await_beat(1, lambda beat: beat.v >= 3, "some steps")
    step = save_what_is_left(cluster, lost=0)
    kept = cluster.await_message(events.CheckpointKept, how="dying")
    assert (kept.step, kept.generation, kept.rank) == (step, 2, 1)
    path = CheckpointFolder(folder, 2).of(step)
    assert len(list(path.glob("digest-*"))) == 3 and len(digests(path)) == 1, "three wrote the same state"
    assert json.loads((path / "about.json").read_text())["written_by"] == [1, 2, 3]
    cluster.fence()
    cluster.start(saving.keep, 0, joins=True, folder=str(folder), every=SELDOM)
    cluster.await_message(events.WorkerCommitted, count=4, generation=3)


def test_one_that_is_there_already_is_told_as_well(train) -> None:
    """All ranks save before each step, so the loss falls next to a checkpoint or into one."""
    cluster, folder = train(3, every=1)
    cluster.await_message(events.CheckpointKept, how="saved", step=3)
    step = save_what_is_left(cluster, lost=0)
    assert cluster.await_message(events.CheckpointKept, how="dying").step == step
    assert step in CheckpointFolder(folder, 2).steps()


def test_a_hook_that_raises_without_the_others_is_told_to_the_manager(train) -> None:
    cluster, folder = train(3, raises_in="dying", every=SELDOM)
    cluster.await_beat(1, lambda beat: beat.v >= 3, "some steps")
    step = save_what_is_left(cluster, lost=2)
    failed = cluster.await_message(events.CheckpointFailed)
    assert (failed.rank, failed.step) == (1, step)
    assert "no room in dying" in failed.reason
    assert step not in CheckpointFolder(folder, 2).steps()


def test_a_hook_that_raises_is_an_exception_of_the_script(train) -> None:
    cluster, folder = train(2, raises_in="save")
    raised = cluster.await_message(events.WorkerRaised, rank=1)
    assert "ValueError: no room in save" in raised.raised.traceback and raised.raised.step == 5
    assert CheckpointFolder(folder, 2).steps() == []


def test_without_a_permission_nothing_is_kept(train) -> None:
    cluster, folder = train(1, steps=12)
    cluster.permit = lambda asked: answer(asked, asked.step != 5)
    cluster.await_end()
    assert CheckpointFolder(folder, 2).steps() == [10]
    assert "the checkpoint of step 5 is not kept" in cluster.log(0)


def test_the_next_job_loads_the_newest_one(train, make_cluster) -> None:
    first, folder = train(2, steps=12)
    first.await_end()
    (folder / ".draft-00000015-0").mkdir()  # a job that ended while it saved
    then = make_cluster(2)
    then.permit = answer
    then.start_all(saving.keep, folder=str(folder), steps=17)
    then.await_end()
    assert then.whole_logs().count("loaded step-00000010: True") == 2
    assert [e.step for _, _, e in then.messages if isinstance(e, events.CheckpointKept)] == [10, 15]
    assert [e.v for _, _, e in then.messages if isinstance(e, events.WorkerRestored)] == [10, 10]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000015"]


def test_a_folder_that_is_not_shared_is_refused(train, make_cluster, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "of-0", 2)
    folder.put_in_place(folder.draft(5, 1), 5, {})
    cluster, _ = train(2, folder=str(tmp_path / "of-{rank}"))
    raised = cluster.await_message(events.WorkerRaised)
    assert "has to be on a filesystem that all nodes share" in raised.raised.traceback
