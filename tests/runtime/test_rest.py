"""The rest of an epoch, dealt out anew: each sample once over any sequence of world sizes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from flashrec.runtime.data import Data
from flashrec.runtime.loading import source_of
from flashrec.runtime.picks import Picks
from flashrec.runtime.quiet import quiet
from flashrec.runtime.rest import Rest, place, rigid
from flashrec.runtime.stretches import Stretches

Samples = list[list[int]]  # of each rank


class World:
    """The batch samplers of all ranks of a world, and where its batches begin."""

    def __init__(self, size: int, length: int, batch: int, rest: Rest | None = None, **options: Any) -> None:
        drop_last = options.pop("drop_last_batch", False)
        self.samplers = [
            BatchSampler(
                DistributedSampler(range(length), size, rank, **{"seed": 5, **options}),  # type: ignore[arg-type]
                batch,
                drop_last,
            )
            for rank in range(size)
        ]
        self.size, self.rest = size, rest

    def read(self, start: int, stop: int) -> list[list[tuple[int, list[int]]]]:
        """Of each rank (epoch, samples) of the batches `start` … `stop` - 1."""
        picks = [Picks(sampler, 0, start, lambda: stop, self.rest) for sampler in self.samplers]
        return [[(pick.epoch, pick.indices) for pick in each] for each in picks]

    def leave(self, number: int) -> tuple[int, int]:
        """What the next world begins with; all ranks have to say the same."""
        (found,) = {place(sampler, number, self.rest) for sampler in self.samplers}
        return found


def epochs(reads: list[list[list[tuple[int, list[int]]]]]) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = {}
    for world in reads:
        for rank in world:
            for epoch, indices in rank:
                found.setdefault(epoch, Counter()).update(indices)
    return found


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 5),
    stretches=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=5),
    shuffle=st.booleans(),
)
def test_each_sample_comes_once_in_any_sequence_of_worlds(
    length: int, batch: int, stretches: list[tuple[int, int]], shuffle: bool
) -> None:
    """stretches: (world size, batches that it reads)."""
    rest, number, reads, sizes = None, 0, [], []
    for size, count in stretches:
        world = World(size, length, batch, rest, shuffle=shuffle)
        reads.append(world.read(number, number + count))
        number += count
        rest = Rest(number, *world.leave(number))
        sizes.append(size)
    assert rest is not None
    found = epochs(reads)
    for epoch, read in found.items():
        if epoch < rest.epoch:
            assert read.keys() == set(range(length)), f"epoch {epoch} lacks samples"
            assert sum(read.values()) - length < max(sizes), f"epoch {epoch}: more than what fills up the last row"
        else:
            assert epoch == rest.epoch and read.total() == len(read) == rest.read, f"epoch {epoch} is not as it is said"


@pytest.mark.parametrize("drop", [True, False])
def test_without_a_resize_it_is_what_torch_yields(drop: bool) -> None:
    """Beginning anew in the same world changes nothing, wherever in an epoch."""
    plain = World(3, 50, 4, drop_last=drop, drop_last_batch=drop)
    through = plain.read(0, 40)
    for number in range(40):
        again = World(3, 50, 4, Rest(number, *plain.leave(number)), drop_last=drop, drop_last_batch=drop)
        assert again.read(number, 40) == [rank[number:] for rank in through], number
        assert again.leave(39) == plain.leave(39)
        assert again.read(number + 3, 40) == [rank[number + 3 :] for rank in through], "begins beyond the rest"


def test_ranks_read_the_same_number_of_samples_and_dropping_drops() -> None:
    """Of 11 samples 4 are read; 3 ranks share 7 of them."""
    kept = World(3, 11, 2, Rest(2, 0, 4), shuffle=False).read(2, 4)
    assert [[i for _, batch in rank for i in batch] for rank in kept] == [[4, 7, 10], [5, 8, 0], [6, 9, 1]]
    dropped = World(3, 11, 2, Rest(2, 0, 4), shuffle=False, drop_last=True).read(2, 3)
    assert [[i for _, batch in rank for i in batch] for rank in dropped] == [[4, 7], [5, 8], [6, 9]]
    assert World(3, 11, 2, Rest(2, 0, 4), drop_last=True).leave(3) == (1, 0)
    assert World(3, 11, 2, Rest(2, 0, 4), drop_last=True).leave(4) == (1, 6)


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (BatchSampler(RandomSampler(range(9)), 2, False), "RandomSampler is not known"),
        (BatchSampler(SequentialSampler(range(9)), 2, False), "SequentialSampler is not known"),
        (DistributedSampler(range(9), 2, 0), "DistributedSampler is not known to deal"),
        (type("Mine", (BatchSampler,), {})(DistributedSampler(range(9), 2, 0), 2, False), "Mine is not known"),
        (BatchSampler(type("Own", (DistributedSampler,), {})(range(9), 2, 0), 2, False), "Own is not known"),
    ],
)  # fmt: skip
def test_what_else_deals_samples_out_is_refused(sampler: Any, why: str) -> None:
    assert why in rigid(sampler)


def test_a_session_tells_where_its_data_are_and_forgets_what_it_has_prefetched() -> None:
    def make(size: int, stretches: Stretches, micro: int) -> Data:
        loader = DataLoader(range(24), batch_size=2, sampler=DistributedSampler(range(24), size, 0, shuffle=False))  # type: ignore[arg-type]
        source = source_of(loader, 0, lambda: None)
        return stretches.add_data(lambda begins: Data(source, micro, lambda: 0, lambda why: quiet(None, why), begins))

    old, new = Stretches(), Stretches()
    assert "neither session.data nor session.on_resize" in old.rigid()
    make(3, old, 1)
    assert not old.rigid()
    assert old.places(3) == ((0, 18),)
    data = make(1, new, 2)
    assert data.batch(3, 0).tolist() == [12, 13]
    new.begin(3, 3, old.places(3))
    assert [data.batch(3, i).tolist() for i in range(2)] == [[18, 19], [20, 21]]
    assert data.batch(4).tolist() == [22, 23]
    assert new.places(4) == ((0, 22),) and new.places(5) == ((1, 2),)
    joiner = Stretches()
    joined = make(1, joiner, 2)
    joiner.load_state_dict(new.state_dict())
    assert joined.batch(3, 1).tolist() == [20, 21] and joiner.former_size == 3
    with pytest.raises(RuntimeError, match="read 0 data sets, this one 1"):
        new.begin(3, 3, ())


def test_a_checkpoint_of_another_world_begins_a_stretch_and_one_of_this_world_goes_on_with_its_own() -> None:
    told: list[tuple[int, int]] = []
    stretches = Stretches()
    stretches.add_callback(lambda old, new: told.append((old, new)))
    stretches.of_checkpoint(5, 4, {"world_size": 4, "places": [], "stretch": {"step": 2, "former": 8, "places": []}})
    assert (stretches.state_dict()["step"], told) == (2, [])
    stretches.of_checkpoint(5, 2, {"world_size": 4, "places": [], "stretch": {"step": 2, "former": 8, "places": []}})
    assert (stretches.state_dict(), told) == ({"step": 5, "former": 4, "places": []}, [(4, 2)])
    stretches.of_checkpoint(6, 4, {"world_size": 2})
    assert told == [(4, 2)], "a checkpoint without this knowledge"
    with pytest.raises(TypeError, match="str cannot be called"):
        stretches.add_callback("scale")  # type: ignore[arg-type]


def test_shares_are_what_torch_says_for_a_whole_epoch() -> None:
    for size in range(1, 6):
        for length in range(1, 14):
            for drop in (True, False):
                if drop and length < size:
                    continue
                sampler: Any = BatchSampler(DistributedSampler(range(length), size, 0, drop_last=drop), 2, drop)  # type: ignore[arg-type]
                assert Rest(0, 0, 0).num_batches(sampler) == len(sampler), (size, length, drop)
                assert math.ceil(len(sampler.sampler) / 2) >= len(sampler)
