"""Optimizers whose step waits for other ranks: real processes, one of which is lost inside of it or right after."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrec.runtime import stuck
from flashrec.runtime.undo import Undo
from tests.runtime import programs
from tests.runtime.attendant import Attendant, Ending
from tests.runtime.layouts import program
from tests.runtime.layouts.layout import TABLE
from tests.runtime.layouts.outcome import Outcome, undisturbed
from tests.runtime.support import Cluster

pytestmark = pytest.mark.torch
STEPS = 6
TIMEOUT_S = 120.0


def train(
    out: str,
    layout: str,
    lose_vote: tuple[int, tuple[int, ...]] = (0, ()),
    session: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """A layout with other arguments of Session. lose_vote: (step, ranks) that do not learn the result of its vote."""

    def build() -> Any:
        setup = TABLE[layout].build()
        setup.session |= session or {}
        if os.environ["FLASHREC_INCARNATION"] == "1" and int(os.environ["RANK"]) in lose_vote[1]:
            programs._lose_vote(lose_vote[0])
        print("threads at the start", len(stuck.gloo_threads()), file=sys.stderr)
        return setup

    def restore(undo: Undo) -> None:
        print("threads at the undo", len(stuck.gloo_threads()), file=sys.stderr)
        real(undo)

    real, Undo.restore = Undo.restore, restore
    program.TABLE = {layout: types.SimpleNamespace(build=build)}
    program.train(out, layout, STEPS, **more)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Outcome]:
    cache = tmp_path_factory.mktemp("undisturbed")
    return lambda layout, size: undisturbed(layout, size, STEPS, cache)


@pytest.fixture
def run(make_cluster: Callable[..., Cluster]) -> Callable[..., tuple[Cluster, Ending]]:
    def run(
        layout: str,
        size: int,
        faults: list[tuple[int, int, int, str]],
        ends: tuple[Ending, ...] = (Ending.DONE, Ending.REFUSED),
        **config: Any,
    ) -> tuple[Cluster, Ending]:
        cluster = make_cluster(size)
        attendant = Attendant(cluster, train, {"layout": layout, "faults": faults, **config}, gather_s=0.02)
        attendant.start()
        ending = attendant.run(TIMEOUT_S)
        assert ending in ends, attendant.why + cluster.logs()
        assert sum(cluster.log(rank).count("fault t=") for rank in range(size)) == len(faults)
        return cluster, ending

    return run


def assert_exact(cluster: Cluster, right: Outcome) -> None:
    found = Outcome(Path(cluster.path), cluster.world_size)
    assert not found.differences(right), cluster.logs()


def test_who_has_voted_keeps_its_update_if_somebody_has_passed(run, wanted) -> None:
    cluster, _ = run("muon_sharded_step", 3, [(2, 1, 3, "after-optimizer")], lose_vote=(3, (1,)))
    assert (cluster.plans[0].resume_step, cluster.plans[0].roll_forward) == (4, (1,))
    assert "kept_update" in cluster.log(1) and "threads at the undo" not in cluster.log(1)
    assert_exact(cluster, wanted("muon_sharded_step", 3))


def test_all_undo_a_finished_update_if_nobody_alive_has_passed(run, wanted) -> None:
    cluster, _ = run("muon_sharded_step", 3, [(2, 1, 3, "after-optimizer")], lose_vote=(3, (0, 1)))
    assert (cluster.plans[0].resume_step, cluster.plans[0].roll_forward) == (3, ())
    assert_exact(cluster, wanted("muon_sharded_step", 3))
    for rank in (0, 1):  # operations of the former groups have ended by then: they could write into parameters
        (before,) = _numbers(cluster.log(rank), "threads at the start")
        assert _numbers(cluster.log(rank), "threads at the undo") == [before]


def test_who_is_seen_to_communicate_is_protected_from_then_on_and_so_is_its_replacement(run, wanted) -> None:
    faults = [(1, 1, 2, "amid-optimizer"), (0, 1, 4, "amid-optimizer")]
    cluster, _ = run("muon_sharded_step", 2, faults, session={"optimizer_communicates": None})
    assert [plan.resume_step for plan in cluster.plans] == [2, 4]
    assert "optimizer.step() has issued" in cluster.log(1)
    assert_exact(cluster, wanted("muon_sharded_step", 2))


def test_without_undo_a_cut_update_is_torn_on_all_ranks(run) -> None:
    cluster, ending = run(
        "muon_sharded_step", 2, [(1, 1, 2, "amid-optimizer")], session={"optimizer_communicates": False}
    )
    assert ending is Ending.REFUSED and "its optimizer step was cut" in cluster.log(0)


def test_state_that_is_spread_over_all_ranks_is_not_protected_and_that_is_said(run) -> None:
    cluster, ending = run("zero1", 2, [(1, 1, 2, "backward")])
    assert ending is Ending.REFUSED
    (refusal,) = cluster.refusals
    assert refusal.ranks == (1,)
    assert "not protected: rank 0-1, because" in cluster.log(0)
    assert "this rank's part of the state of ZeroRedundancyOptimizer exists once" in cluster.log(0)


def test_replicas_that_hold_other_bits_are_none(run, wanted) -> None:
    """The script does not say that each pair shares the momenta out; it is seen when they are compared in step 1."""
    config = {"session": {"replicas": None}}
    cluster, _ = run("muon_sharded_state", 4, [(3, 1, 3, "amid-optimizer")], **config)
    assert cluster.plans[0].sources == {3: 1}
    assert "rank 0, 2 should hold the same as rank 1" in cluster.log(1)
    assert_exact(cluster, wanted("muon_sharded_state", 4))
    cluster, ending = run("muon_sharded_state", 4, [(3, 1, 1, "forward")], **config)
    assert ending is Ending.REFUSED


@pytest.mark.parametrize(
    ("layout", "size", "text"),
    [
        ("zero1", 2, "the source holds the optimizer state of other parameters than this rank"),
        ("zero1_grouped", 4, "rank 0 and rank 1 are to send parts of one state, but hold other tensors"),
    ],
)
def test_zero_is_not_restored_from_a_rank_that_owns_other_parameters(run, layout: str, size: int, text: str) -> None:
    """The script is wrong about who holds the same, and a rank is lost before that is compared."""
    session = {"replicas": list(range(size))}
    victim = size - 1
    cluster, _ = run(layout, size, [(victim, 1, 1, "forward")], ends=(Ending.FAILED,), session=session)
    assert text in cluster.log(victim)


def test_one_rank_of_each_half_at_once(run, wanted) -> None:
    cluster, _ = run("zero1_grouped", 4, [(0, 1, 3, "amid-optimizer"), (3, 1, 3, "amid-optimizer")])
    assert_exact(cluster, wanted("zero1_grouped", 4))


def _numbers(log: str, what: str) -> list[int]:
    return [int(line.removeprefix(what)) for line in log.splitlines() if line.startswith(what)]
