"""Once for each step that counts: samples over all ranks and lives, and callbacks."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashrec.core import events
from flashrec.runtime import api
from tests.runtime import counting
from tests.runtime.support import Cluster

pytestmark = pytest.mark.torch
STEPS, WORLD_SIZE = 9, 3


def recorded(folder: Path, name: str, rank: int, life: int) -> list[Any]:
    return [json.loads(line) for line in (folder / f"{name}.{rank}.{life}").read_text().splitlines()]


def without_failure(rank: int) -> dict[tuple[int, int], Any]:
    """The batches of a rank, without worker processes and without `flashrec run`."""
    model = torch.nn.Linear(1, 1)
    session = api.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = session.data(counting.loader(None, WORLD_SIZE, rank, 0), micro_batches=counting.MICRO_BATCHES)
    places = [(step, micro) for step in range(STEPS) for micro in range(counting.MICRO_BATCHES)]
    return {place: counting.bits(data.batch(*place)) for place in places}


def test_samples_and_callbacks_over_all_lives(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Rank 2 is lost in a forward pass, rank 1 just after an update, rank 0 between two steps. In the second of these
    rank 0 does not learn the result of the vote and rolls forward, and rank 2 is cut between its update and the end of
    the block."""
    config = {
        "folder": str(tmp_path),
        "steps": STEPS,
        "faults": [(2, 1, 2, "forward"), (1, 1, 4, "after-optimizer"), (0, 1, 6, "between")],
        "lose_vote": (0, 4),
        "late_reduce": 4,
    }
    cluster = make_cluster(WORLD_SIZE)
    cluster.start_all(counting.train, **config)
    for victim in (2, 1, 0):
        assert cluster.await_exit(victim) == -signal.SIGKILL, cluster.logs()
        cluster.replace(victim, program=counting.train, **config)
    cluster.await_end()
    assert [plan.resume_step for plan in cluster.plans] == [2, 5, 7]
    assert cluster.plans[1].roll_forward == (0,)
    assert any(mark["stage"] == "committed" for mark in cluster.marks("caught")), "rank 2 was cut after its update"

    wanted = {rank: without_failure(rank) for rank in range(WORLD_SIZE)}
    resumed = {2: 2, 1: 5, 0: 7}  # rank: first step of its second life
    for rank, first in resumed.items():
        lives = [recorded(tmp_path, "used", rank, life) for life in (1, 2)]
        for step, micro, bits in lives[0] + lives[1]:
            assert bits == wanted[rank][step, micro], f"rank {rank} step {step} micro-batch {micro}"
        assert {(step, micro) for step, micro, _ in lives[0] + lives[1]} == set(wanted[rank])
        assert lives[1][0][:2] == [first, 0]

        rest = Counter(i for (step, _), bits in wanted[rank].items() if step >= first for i in bits[0])
        assert Counter(recorded(tmp_path, "loaded", rank, 2)) == rest, "a joiner loads what it uses, and nothing twice"
        every = Counter(i for bits in wanted[rank].values() for i in bits[0])
        assert Counter(recorded(tmp_path, "loaded", rank, 1)) <= every, "no survivor loads a sample twice"

    order = [[i for bits in wanted[rank].values() for i in bits[0]] for rank in range(WORLD_SIZE)]
    epoch = counting.NUM_SAMPLES // WORLD_SIZE
    first_epoch = Counter(i for rank in order for i in rank[:epoch])
    assert len(first_epoch) == epoch * WORLD_SIZE
    assert set(first_epoch.values()) == {1}

    committed = {(rank, life): recorded(tmp_path, "committed", rank, life) for rank in resumed for life in (1, 2)}
    assert committed[2, 1] == [0, 1]
    assert committed[1, 1] == [0, 1, 2, 3], "the former life of rank 1 ended between its update and the callback"
    assert committed[0, 1] == [0, 1, 2, 3, 4, 5, 6]
    for rank, first in resumed.items():
        assert committed[rank, 2] == list(range(first, STEPS))
    assert len({result["digest"] for result in cluster.results().values()}) == 1


def test_a_callback_comes_before_the_pause_of_a_planned_swap(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """The life that is taken over has no time afterwards."""
    config = {"folder": str(tmp_path), "steps": 60}
    cluster = make_cluster(2)
    cluster.start_all(counting.train, **config)
    cluster.await_message(events.WorkerCommitted, count=2)
    cluster.start_successor(1, counting.train, **config)
    cluster.pause()
    cluster.await_end()
    former, later = (recorded(tmp_path, "committed", 1, life) for life in (1, 2))
    assert former + later == recorded(tmp_path, "committed", 0, 1) == list(range(60))
    assert former and later


def session() -> api.Session:
    model = torch.nn.Linear(1, 1)
    return api.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_exception_of_a_callback_is_the_scripts_and_does_not_bring_it_back() -> None:
    called: list[tuple[str, int]] = []
    training = session()

    @training.on_commit
    def first(step: int) -> None:
        called.append(("first", step))
        if step == 1:
            raise OSError("disk full")

    training.on_commit(lambda step: called.append(("second", step)))
    for step in training.steps(3):
        try:
            with step:
                assert called == [(who, n) for n in range(step) for who in ("first", "second")]
        except OSError:
            assert step == 1
    assert called == [(who, n) for n in range(3) for who in ("first", "second")]


def test_a_step_that_an_exception_has_left_does_not_count() -> None:
    called: list[int] = []
    training = session()
    training.on_commit(called.append)
    with pytest.raises(ValueError, match="bug"):
        for step in training.steps(3):
            with step:
                if step == 1:
                    raise ValueError("bug")
    assert called == [0]
    with pytest.raises(TypeError, match="cannot be called"):
        training.on_commit(None)


def test_the_first_callback_is_that_of_the_first_step() -> None:
    called: list[int] = []
    training = session()
    training.on_commit(called.append)
    for step in training.steps(7, start=5):
        with step:
            pass
    assert called == [5, 6]
