"""A few cells of layout x fault, so that every layout is lost and restored once; the whole matrix is a target of its
own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.runtime.layouts import program
from tests.runtime.layouts.layout import TABLE
from tests.runtime.support import Cluster

pytestmark = pytest.mark.torch
Results = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Results]]:
    cache: dict[str, Results] = {}

    def run(layout: str) -> Results:
        if layout not in cache:
            cluster = Cluster(tmp_path_factory.mktemp("undisturbed"), TABLE[layout].world_size)
            try:
                cluster.start_all(program.train, layout=layout)
                cluster.await_end()
                cache[layout] = cluster.results()
            finally:
                cluster.close()
        return cache[layout]

    yield run


def assert_same(found: Results, wanted: Results) -> None:
    for rank, result in wanted.items():
        for step, loss in found[rank]["losses"].items():
            assert loss == result["losses"][step], f"rank {rank} step {step}"
        assert found[rank]["digest"] == result["digest"], f"state of rank {rank}"


@pytest.mark.parametrize(
    ("layout", "step", "place"),
    [(name, step, place) for name, row in TABLE.items() if row.is_protected for step, place in row.cells],
)
def test_a_killed_rank_is_replaced_bit_by_bit(
    layout: str, step: int, place: str, make_cluster: Callable[..., Cluster], undisturbed: Callable[[str], Results]
) -> None:
    victim = TABLE[layout].world_size - 1
    cluster = make_cluster(TABLE[layout].world_size)
    config = {"layout": layout, "faults": [(victim, 1, step, place)]}
    cluster.start_all(program.train, **config)
    assert cluster.await_exit(victim) == -signal.SIGKILL, cluster.logs()
    cluster.replace(victim, program=program.train, **config)
    cluster.await_end()
    assert_same(cluster.results(), undisturbed(layout))
