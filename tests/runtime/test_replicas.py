"""Which ranks are found to hold the same shards, and what the user is told."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flashrec.runtime.parallel import replicas
from flashrec.runtime.parallel.replicas import Piece, Replicas
from tests.runtime import alone
from tests.runtime.layouts.layout import TABLE

pytestmark = pytest.mark.torch


def find_in(layout: str) -> Replicas:
    return replicas.find(TABLE[layout].build().model, dist.get_rank())


@pytest.mark.parametrize(
    ("layout", "rank"), [("hsdp", 0), ("hsdp", 3), ("tp", 1), ("hsdp_tp", 2), ("hsdp_tp", 5), ("fsdp2", 1)]
)
def test_replicas_are_found_in_meshes(layout: str, rank: int) -> None:
    row = TABLE[layout]
    found = alone.run(rank, row.world_size, find_in, layout)
    assert set(found.ranks) == next(group for group in row.replica_groups(row.world_size) if rank in group), found
    assert found.is_protected is row.is_protected


class Told:
    """A `Holder`."""

    def __init__(self, *pieces: Piece) -> None:
        self._pieces = pieces

    def held_by(self) -> Iterable[Piece]:
        return self._pieces


def find_in_mixtures() -> dict[str, Replicas]:
    """As rank 1 of 4."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])][0]
    every = DistributedDataParallel(nn.Linear(2, 2))
    pair = DistributedDataParallel(nn.Linear(2, 2), process_group=pairs)
    ignoring = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["1.weight", "1.bias"])
    ignoring = DistributedDataParallel(ignoring)
    expert = tuple(ignoring.module[1].parameters())
    shard = Piece("the shard of an optimizer", (1, 3), "it is spread over pairs")
    return {
        "ddp": replicas.find(every, 1),
        "ddp in pairs": replicas.find(pair, 1),
        "both": replicas.find(nn.Sequential(every, pair), 1),
        "plain": replicas.find(nn.Linear(2, 2), 1),
        "ddp and plain": replicas.find(nn.Sequential(every, nn.Linear(2, 2)), 1),
        "ignored by ddp": replicas.find(ignoring, 1),
        "ignored by ddp, but told": replicas.find(ignoring, 1, [Told(Piece("expert", (1, 3), "experts", expert))]),
        "narrowed": replicas.find(every, 1, [Told(shard)]),
        "nobody has both": replicas.find(pair, 1, [Told(shard)]),
        "buffers only": replicas.find(nn.BatchNorm1d(2, affine=False), 1),
    }


def test_a_replica_holds_every_piece() -> None:
    found = alone.run(1, 4, find_in_mixtures)
    ranks = {name: each.ranks for name, each in found.items()}
    assert ranks == {
        "ddp": (0, 1, 2, 3),
        "ddp in pairs": (0, 1),
        "both": (0, 1),
        "plain": (1,),
        "ddp and plain": (1,),
        "ignored by ddp": (1,),
        "ignored by ddp, but told": (1, 3),
        "narrowed": (1, 3),
        "nobody has both": (1,),
        "buffers only": (1,),
    }
    assert found["ddp and plain"].why == "parameter 1.weight exists once: it is in no DDP or FSDP module"
    assert found["nobody has both"].why == (
        "no rank holds both the shard of an optimizer (it is spread over pairs) and "
        "parameter module.weight (DDP over 2 ranks)"
    )


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([(2, "HSDP")] * 8, ["protected: 8 of 8 ranks, 2 replicas each (HSDP)"]),
        ([(1, "FSDP")] * 4, ["not protected: rank 0-3, because FSDP", "exit code 75", "use HSDP"]),
        (
            [(2, "DDP"), (2, "DDP"), (1, "an expert"), (4, "DDP"), (1, "x")],
            ["protected: 3 of 5 ranks, 2 to 4 replicas each (DDP)", "not protected: rank 2, 4, because an expert"],
        ),
    ],
)
def test_one_line_says_what_is_protected(told: list[tuple[int, str]], words: list[str]) -> None:
    line = replicas.line(told)
    assert [word for word in words if word not in line] == [] and "\n" not in line
