"""Who is mirrored where: every rank asks with what it alone knows, and all find the same. The ranks are threads, and
their collectives a table, so a rank that leaves one out shows as the others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from flashrec.runtime.mirrors import placement
from flashrec.runtime.mirrors.placement import Places

pytestmark = pytest.mark.torch
TIMEOUT_S = 30.0
T = TypeVar("T")


class Ranks:
    """Stands for torch.distributed among threads."""

    def __init__(self, world_size: int) -> None:
        self._size, self._here = world_size, threading.local()
        self._given: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=TIMEOUT_S)

    def run(self, work: Callable[[int], T]) -> list[T]:
        def on_rank(rank: int) -> T:
            self._here.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(on_rank, range(self._size)))

    def get_rank(self) -> int:
        return int(self._here.rank)

    def get_world_size(self) -> int:
        return self._size

    def all_gather(self, every: list[torch.Tensor], mine: torch.Tensor) -> None:
        for into, given in zip(every, self._exchange(mine), strict=True):
            into.copy_(given)

    def all_reduce(self, mine: torch.Tensor) -> None:
        mine.copy_(sum(self._exchange(mine)))

    def _exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.get_rank()] = mine.clone()
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Places]:
    """What all ranks find. replicas: of each rank; by default nobody has any."""

    def found(
        nodes: Sequence[str], mode: bool | str = True, *, first: bool = True, switches: Sequence[str] = (),
        replicas: Sequence[Sequence[int]] = (),
    ) -> Places:  # fmt: skip
        ranks = Ranks(len(nodes))
        monkeypatch.setattr(placement, "dist", ranks)

        def of(rank: int) -> Places:
            switch = switches[rank] if switches else ""
            same = replicas[rank] if replicas else [rank]
            return placement.find(nodes[rank], switch, same, mode, torch.device("cpu"), first=first)

        one, *others = ranks.run(of)
        assert all(other == one for other in others), "or a rank waits for a mirror that nobody sends"
        return one

    return found


PAIRS = [[0, 2], [1], [0, 2], [3]]  # ranks 0 and 2 hold the same, 1 and 3 are alone


@pytest.mark.parametrize(
    ("mode", "nodes", "holder_of"),
    [
        (True, "a a b b", {1: 3, 3: 1}),  # the others have a replica on another node
        (True, "a b a b", {0: 1, 1: 0, 2: 3, 3: 2}),  # here the replicas are on one node
        ("all", "a a b b", {0: 2, 1: 3, 2: 0, 3: 1}),
        ("process", "a a b b", {0: 1, 1: 2, 2: 3, 3: 0}),  # the next rank, wherever it is
        ("process", "a a a a", {0: 1, 1: 2, 2: 3, 3: 0}),
    ],
)
def test_who_is_mirrored_where(
    mode: bool | str, nodes: str, holder_of: dict[int, int], find: Callable[..., Places]
) -> None:
    found = find(nodes.split(), mode, replicas=PAIRS)
    assert found == Places(tuple(nodes.split()), ("",) * 4, holder_of)
    assert [found.held_by(rank) for rank in range(4)] == [
        {rank for rank, holder in holder_of.items() if holder == here} for here in range(4)
    ]


def test_nobody_is_mirrored_where_all_have_replicas_elsewhere(find: Callable[..., Places]) -> None:
    assert find(["a", "b"], replicas=[[0, 1], [0, 1]]).holder_of == {}


def test_a_holder_at_another_switch_is_taken(find: Callable[..., Places]) -> None:
    assert find(list("abcd"), switches=["s1", "s1", "s2", "s2"]).holder_of == {0: 2, 1: 3, 2: 0, 3: 1}


@pytest.mark.parametrize(
    ("nodes", "mode", "said"),
    [
        (["a", "a"], True, r"all ranks are on one node \(a\): run on two or more nodes, or say mirrors='process'"),
        (["a", "a"], "all", r"Session\(mirrors='all'\) keeps the state of each rank on another node"),
        (["", ""], True, "what node the ranks are on is not known"),
        (["a"], "process", "keeps the state of each rank at another one, but there is only one"),
    ],
)
def test_a_job_that_cannot_be_protected_is_refused_at_its_start(
    nodes: list[str], mode: bool | str, said: str, find: Callable[..., Places]
) -> None:
    with pytest.raises(RuntimeError, match=said):
        find(nodes, mode)


def test_ranks_that_have_come_to_one_node_are_covered_as_far_as_they_can_be(
    find: Callable[..., Places], caplog: pytest.LogCaptureFixture
) -> None:
    """After a recovery: the job trains on, and says so."""
    assert find(["a", "b"], first=False).holder_of == {0: 1, 1: 0} and not caplog.messages
    assert find(["a", "a"], first=False).holder_of == {0: 1, 1: 0}
    assert "all ranks are on one node (a): until that changes they cover the loss of a process, not of" in caplog.text


def test_names_are_those_that_were_told(find: Callable[..., Places]) -> None:
    """Of one that is too long the end, even if that begins in the middle of a letter."""
    found = find(["n1", "ä" * 64 + "x"], switches=["top.s1", ""])
    assert found.nodes[0] == "n1" and found.nodes[1].endswith("ä" * 63 + "x")
    assert found.switches == ("top.s1", "")
