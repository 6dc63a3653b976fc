"""`session.may_commit()` in real workers: who says yes, and everything that makes it a no."""

from __future__ import annotations

import os

import pytest
import torch

import flashrec
from flashrec.core import events
from flashrec.wire import messages as m
from tests.runtime import programs
from tests.runtime.support import Cluster

pytestmark = pytest.mark.torch


def answer(asked: m.CommitAsked, granted: bool = True, valid_s: float = 60.0) -> m.CommitAnswered:
    return m.CommitAnswered(asked.rank, asked.incarnation, asked.request, granted, "" if granted else "no!", valid_s)


def await_log(cluster: Cluster, rank: int, text: str) -> None:
    while text not in cluster.log(rank):
        assert cluster.processes[rank].is_alive(), cluster.log(rank)
        os.sched_yield()


def test_yes_no_and_no_answer(make_cluster) -> None:
    cluster = make_cluster(1)
    cluster.permit = lambda asked: answer(asked, asked.step != 2)
    cluster.start_all(programs.committer, timeout_s=0.5)
    await_log(cluster, 0, "step 3 may commit: True")
    log = cluster.log(0)
    assert "step 1 may commit: True" in log
    assert "step 2 may commit: False" in log and "rank 0 may not commit step 2: no!" in log
    asked = cluster.await_message(m.CommitAsked, rank=0)
    assert (asked.generation, asked.incarnation, asked.step) == (1, 1, 1)
    cluster.permit = None
    await_log(cluster, 0, "no answer within 0.5 s")
    await_log(cluster, 0, "may commit: False\nrank 0 may not commit")


def test_a_fence_ends_the_wait_with_a_no(make_cluster) -> None:
    """Long before its time-out: a newer generation is there, so this one commits nothing."""
    cluster = make_cluster(2)
    cluster.start_all(programs.committer)
    cluster.await_message(m.CommitAsked, count=2)
    assert cluster.await_beat(0, lambda beat: beat.quiet, "why it stands still").quiet == "may_commit"
    cluster.fence()
    for rank in (0, 1):
        await_log(cluster, rank, "step 1 may commit: False")
        assert "may not commit step 1: generation 1 is superseded by 2" in cluster.log(rank)
    cluster.await_message(events.WorkerCommitted, count=2, generation=2)


def test_a_yes_that_took_too_long_is_asked_again(make_cluster) -> None:
    cluster = make_cluster(1)
    asked: list[m.CommitAsked] = []

    def permit(question: m.CommitAsked) -> m.CommitAnswered:
        asked.append(question)
        return answer(question, valid_s=0.0 if len(asked) < 3 else 60.0)

    cluster.permit = permit
    cluster.start_all(programs.committer)
    await_log(cluster, 0, "step 1 may commit: True")
    assert [question.step for question in asked[:3]] == [1, 1, 1]


def test_without_flashrec_run_it_is_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHREC_SOCKET", raising=False)
    model = torch.nn.Linear(1, 1)
    assert flashrec.Session(model, torch.optim.SGD(model.parameters(), lr=0.1)).may_commit() is True
