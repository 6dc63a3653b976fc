"""Mirrors: a rank whose shard nobody else has is restored from its holder, wherever it is hit, bit by bit."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.runtime.layouts import program
from tests.runtime.layouts.layout import TABLE
from tests.runtime.layouts.test_layouts import Results, assert_same, undisturbed
from tests.runtime.support import Cluster

__all__ = ["undisturbed"]
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("layout", "victim", "step", "place"),
    [
        ("fsdp2", 1, 0, "forward"),
        ("fsdp2", 0, 3, "backward"),
        ("fsdp2", 1, 2, "in-optimizer"),
        ("fsdp2", 0, 3, "after-optimizer"),
        ("fsdp2", 1, 2, "between"),
        ("zero1", 2, 3, "amid-optimizer"),
        ("zero1", 1, 2, "between"),
    ],
)
def test_a_killed_rank_is_restored_from_its_mirror(
    layout: str,
    victim: int,
    step: int,
    place: str,
    make_cluster: Callable[..., Cluster],
    undisturbed: Callable[[str], Results],
) -> None:
    cluster = make_cluster(TABLE[layout].world_size)
    config = {"layout": f"{layout}_mirrored", "faults": [(victim, 1, step, place)]}
    cluster.start_all(program.train, **config)
    assert cluster.await_exit(victim) == -signal.SIGKILL, cluster.logs()
    cluster.replace(victim, program=program.train, **config)
    cluster.await_end()
    assert_same(cluster.results(), undisturbed(layout))
    (plan,) = cluster.plans
    assert plan.mirrored == (victim,) and plan.sources == {victim: (victim + 1) % cluster.world_size}
