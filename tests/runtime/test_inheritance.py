"""What a rank puts aside in the memory of its node: whole, checked, and no more than there is room for."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flashrec.runtime import inheritance
from flashrec.runtime.errors import LayoutMismatch, RecoveryFailed
from flashrec.runtime.handover import unit_of
from flashrec.runtime.inheritance import Header, put_aside, take_over
from flashrec.runtime.shards import Sharding, resized
from flashrec.runtime.state import State
from flashrec.runtime.transfer import Holding

pytestmark = pytest.mark.torch


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Rank:
    """A model with optimizer state, a buffer that is not contiguous, and registered state."""

    def __init__(self, seed: int, width: int = 300, steps: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 3))
        self.model.register_buffer("table", torch.randn(5, 7).t())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1 / (seed + 1))
        self.counter = Counter()
        self.state = State(self.model, [self.optimizer], {"counter": self.counter}, sends_random_state=True)
        for _ in range(steps):
            self.model(torch.randn(4, 8)).sum().backward()
            self.optimizer.step()
            self.counter.value += seed

    def leave(self, path: Path, num_on_node: int = 1) -> int:
        holding = Holding.of(self.state, 2, {})
        return put_aside(path, Header(holding.manifest, 4, ((1, 30), None)), holding, num_on_node)

    def tensors(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.state.tensors()]


def test_another_life_takes_over_all_of_it(tmp_path: Path) -> None:
    old, new = Rank(1), Rank(2, steps=0)
    size = old.leave(tmp_path / "memory" / "rank-0.3")
    assert os.stat(tmp_path / "memory" / "rank-0.3").st_size == size
    drawn = torch.rand(3)
    torch.manual_seed(9)
    header = take_over(tmp_path / "memory" / "rank-0.3", new.state)
    assert (header.manifest.v, header.world_size, header.places) == (2, 4, ((1, 30), None))
    assert torch.equal(torch.rand(3), drawn), "random numbers go on as well"
    assert all(map(torch.equal, new.tensors(), old.tensors())) and len(new.tensors()) > 10
    assert (new.counter.value, new.optimizer.param_groups[0]["lr"]) == (2, 0.5)
    assert os.stat(tmp_path / "memory").st_mode & 0o777 == 0o700


def test_an_older_one_of_the_same_rank_goes_and_others_stay(tmp_path: Path) -> None:
    for name in ("rank-0.3", "rank-10.3", "rank-0.5"):
        Rank(1).leave(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.5", "rank-10.3"]


@pytest.mark.parametrize("where", [3, -1, -20, 4000])
def test_a_changed_byte_is_noticed(tmp_path: Path, where: int) -> None:
    path = tmp_path / "rank-0.3"
    Rank(1).leave(path)
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecoveryFailed):
        take_over(path, Rank(2, steps=0).state)


@pytest.mark.parametrize("length", [0, 10, 500, -1])
def test_a_file_that_is_cut_short_is_noticed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "rank-0.3"
    Rank(1).leave(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RecoveryFailed):
        take_over(path, Rank(2, steps=0).state)


def test_another_model_is_refused(tmp_path: Path) -> None:
    Rank(1).leave(tmp_path / "rank-0.3")
    with pytest.raises(LayoutMismatch):
        take_over(tmp_path / "rank-0.3", Rank(2, width=301, steps=0).state)


def test_the_ranks_of_a_node_need_room_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inheritance, "_available_bytes", lambda: (64 << 20) + 200_000)
    rank = Rank(1)
    size = rank.leave(tmp_path / "rank-0.1", 1)
    assert 100_000 > size > 20_000
    with pytest.raises(OSError, match=r"10 ranks need .* MiB of the memory of this node"):
        rank.leave(tmp_path / "rank-0.2", 10)
    monkeypatch.setattr(inheritance, "_available_bytes", lambda: 1 << 60)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 10, 10, 10, 0, 0, 0, 0, 255)))
    with pytest.raises(OSError, match="1 ranks need"):
        rank.leave(tmp_path / "rank-0.2", 1)


def test_nothing_is_left_of_one_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, views: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        Rank(1).leave(tmp_path / "rank-0.3")
    assert list(tmp_path.iterdir()) == []


def test_the_memory_of_this_machine_is_known() -> None:
    assert inheritance._available_bytes() > 1 << 20


def test_only_dimensions_in_which_all_hold_the_same_are_resized() -> None:
    sharding = Sharding((8, 4), (("replicate", 4, "R", -1), ("shard", 2, "S(0)", 1)))
    assert resized(sharding, {"replicate": 3, "shard": 9}).dims == (("replicate", 3, "R", -1), ("shard", 2, "S(0)", 1))


@pytest.mark.parametrize(
    ("rank", "replicas", "world_size", "unit"),
    [
        (2, (0, 1, 2, 3), 4, 1), (5, (1, 3, 5), 6, 2), (3, (3,), 4, 4), (0, (0,), 1, 1),
        (0, (0, 1), 4, 0), (1, (0, 1, 3), 4, 0), (0, (0, 3), 4, 0),
    ],
)  # fmt: skip
def test_how_many_ranks_hold_one_replica(rank: int, replicas: tuple[int, ...], world_size: int, unit: int) -> None:
    assert unit_of(rank, replicas, world_size) == unit
