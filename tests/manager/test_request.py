"""The shape of the job: how many nodes have ranks, what does not fit and what to do about it."""

from __future__ import annotations

import msgspec
import pytest

from flashrec.config.schema import Config, Pool
from flashrec.manager.entry import run
from flashrec.manager.request import Request, RequestError, Shape, shape


def asked(ranks: int | None = None, nodes: int | None = None, per_node: int | None = None, spares: int | None = None):
    return Request(("true",), (), ranks, nodes, per_node, Config(spares=spares))


@pytest.mark.parametrize(
    ("request_", "num_nodes", "environ", "expected"),
    [
        (asked(), 5, {}, Shape(4, 1, 1)),
        (asked(spares=2), 5, {}, Shape(3, 1, 2)),
        (asked(spares=0), 5, {}, Shape(5, 1, 0)),
        (asked(per_node=8), 5, {}, Shape(4, 8, 1)),
        (asked(), 5, {"SLURM_NTASKS_PER_NODE": "2"}, Shape(4, 2, 1)),
        (asked(), 5, {"SLURM_NTASKS_PER_NODE": "2(x5)"}, Shape(4, 2, 1)),
        (asked(per_node=4), 5, {"SLURM_NTASKS_PER_NODE": "2"}, Shape(4, 4, 1)),
        (asked(ranks=8), 5, {}, Shape(4, 2, 1)),
        (asked(ranks=8, per_node=2), 5, {}, Shape(4, 2, 1)),
        (asked(nodes=2), 5, {}, Shape(2, 1, 3)),
        (asked(nodes=2, spares=2), 5, {}, Shape(2, 1, 3)),
        (asked(nodes=5), 5, {}, Shape(5, 1, 0)),
        (asked(ranks=6, nodes=3, spares=1), 5, {}, Shape(3, 2, 2)),
    ],
)
def test_shape(request_: Request, num_nodes: int, environ: dict[str, str], expected: Shape) -> None:
    assert shape(request_, num_nodes, environ) == expected


@pytest.mark.parametrize(
    ("least", "most", "spares", "num_nodes", "active"),
    [(2, 4, 1, 6, 4), (2, 4, 1, 5, 4), (2, 4, 1, 4, 3), (2, 4, 2, 4, 2), (2, 4, None, 3, 2), (2, 4, None, 2, 2)],
)
def test_a_range_of_nodes_leaves_the_spares_free(
    least: int, most: int, spares: int | None, num_nodes: int, active: int
) -> None:
    request = msgspec.structs.replace(asked(nodes=most, spares=spares), least_nodes=least)
    assert shape(request, num_nodes, {}) == Shape(active, 1, num_nodes - active)


def test_a_range_of_nodes_that_does_not_fit() -> None:
    request = msgspec.structs.replace(asked(nodes=4, spares=2), least_nodes=2)
    with pytest.raises(RequestError, match="2 active nodes and 2 spares need 4 nodes, but the allocation has 3"):
        shape(request, 3, {})


@pytest.mark.parametrize(
    ("request_", "num_nodes", "environ", "said"),
    [
        (asked(spares=5), 5, {}, "leave 0 for ranks"),
        (asked(), 1, {}, "leave 0 for ranks"),
        (asked(nodes=4, spares=2), 5, {}, "need 6 nodes, but the allocation has 5"),
        (asked(nodes=7), 5, {}, "7 active nodes"),
        (asked(ranks=7), 5, {}, "7 ranks do not fit 4 active nodes evenly"),
        (asked(ranks=8, per_node=3), 5, {}, "with 3 each"),
        (asked(ranks=8), 5, {"SLURM_NTASKS_PER_NODE": "3"}, "with 3 each"),
        (asked(), 5, {"SLURM_NTASKS_PER_NODE": "many"}, "is not a count"),
    ],
)
def test_what_does_not_fit_is_refused(request_: Request, num_nodes: int, environ: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        shape(request_, num_nodes, environ)
    assert said in str(caught.value)
    assert "spares leave 7" not in str(caught.value)


def test_a_job_with_a_pool_keeps_no_spares_unless_told_to() -> None:
    pool = msgspec.convert({"name": "p"}, Pool)
    for config, spares in [(Config(pool=pool), 0), (Config(pool=pool, spares=1), 1)]:
        made = shape(Request(("true",), (), None, None, None, config), 5, {})
        assert made == Shape(5 - spares, 1, spares)


def test_there_is_no_pool_without_slurm() -> None:
    with pytest.raises(RequestError, match="--local with --pool"):
        run(Request(("true",), (), None, None, None, Config(pool=Pool(name="p")), local_nodes=3))


def test_a_way_to_ask_slurm_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHREC_SLURM", "rest")
    with pytest.raises(RequestError, match="FLASHREC_SLURM=rest: use cli or pyslurm"):
        run(Request(("true",), (), None, None, None, Config()))
