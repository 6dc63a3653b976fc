"""Which batch a step gets, in one process: numbers, order, epochs, random numbers, worker processes."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from flashrec.runtime import api

pytestmark = pytest.mark.torch
SIZE = 22


class Samples(Dataset):
    """Sample i is (i, what was drawn for it). log: a file that gets a line for each sample that is loaded."""

    def __init__(self, log: Path | None = None) -> None:
        self.log, self.own = log, np.random.default_rng(os.getpid())

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        if self.log:
            with self.log.open("a") as log:
                log.write(f"{index}\n")
        return index, random.random() + np.random.rand() + float(torch.rand(())) + self.own.random()


def session(num_steps: int = 20, at: int = 0) -> api.Session:
    """A session without `flashrec run` whose next step is `at`."""
    model = torch.nn.Linear(1, 1)
    found = api.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in found.steps(num_steps):
        if step == at:
            return found
        with step:
            pass
    raise AssertionError


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These sessions have no last step; their loaders would end in some later test, see `Data.close`."""
    make, made = api.Session.data, []

    def data(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(api.Session, "data", data)
    yield
    for each in made:
        each.close()


def indices(batch: list[torch.Tensor]) -> list[int]:
    return batch[0].tolist()


def bits(batch: list[torch.Tensor]) -> list[Any]:
    return [batch[0].tolist(), [value.hex() for value in batch[1].tolist()]]


def loaders() -> dict[str, Any]:
    return {
        "in-order": lambda **options: DataLoader(Samples(), 4, **options),
        "shuffled": lambda **options: DataLoader(Samples(), 4, shuffle=True, drop_last=True, **options),
        "generator": lambda **options: DataLoader(
            Samples(), 4, shuffle=True, generator=torch.Generator().manual_seed(5), **options
        ),
        "distributed": lambda **options: DataLoader(
            Samples(), 4, sampler=DistributedSampler(Samples(), num_replicas=2, rank=1, drop_last=True), **options
        ),
        "weighted": lambda **options: DataLoader(
            Samples(), 4, sampler=WeightedRandomSampler([1.0 + i for i in range(SIZE)], SIZE), **options
        ),
        "with-replacement": lambda **options: DataLoader(
            Samples(), 4, sampler=RandomSampler(Samples(), replacement=True, num_samples=400), **options
        ),
        "stateful": lambda **options: StatefulDataLoader(Samples(), 4, shuffle=True, **options),
        "buckets": lambda **options: DataLoader(Samples(), batch_sampler=Buckets(), **options),
        "single": lambda **options: DataLoader(Samples(), batch_size=None, collate_fn=one, **options),
    }


def one(sample: tuple[int, float]) -> list[torch.Tensor]:
    return [torch.tensor([part], dtype=kind) for part, kind in zip(sample, (torch.int64, torch.float64), strict=True)]


class Buckets:
    """A batch sampler of the user's own that draws from all kinds of generators as it goes on; no length."""

    def __init__(self) -> None:
        self.generator, self.epoch = random.Random(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(3 + self.epoch):
            yield [self.generator.randrange(SIZE), random.randrange(SIZE), int(np.random.randint(SIZE)), self.epoch]


@pytest.mark.parametrize("kind", loaders())
def test_a_batch_is_a_function_of_the_step(kind: str) -> None:
    """Whatever was asked before, and however often; also in a process that comes later."""
    data = session().data(loaders()[kind]())
    wanted = [bits(data.batch(step)) for step in range(12)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for start in (0, 3, 5, 6, 11):
        joiner = session(at=start).data(loaders()[kind]())
        assert [bits(joiner.batch(step)) for step in range(start, 12)] == wanted[start:]
    assert [bits(joiner.batch(step)) for step in (4, 11, 2, 2)] == [wanted[4], wanted[11], wanted[2], wanted[2]]
    assert len({str(batch[1]) for batch in wanted}) == 12, "each batch draws its own numbers"


@pytest.mark.parametrize("kind", ["shuffled", "buckets"])
def test_worker_processes_load_the_same_bits(kind: str) -> None:
    alone = session(at=4).data(loaders()[kind]())
    helped = session(at=4).data(loaders()[kind](num_workers=2))
    for step in range(4, 12):
        assert bits(helped.batch(step)) == bits(alone.batch(step))


def test_each_sample_comes_once_in_an_epoch_and_the_order_changes() -> None:
    ranks = [
        session().data(DataLoader(Samples(), 3, sampler=DistributedSampler(Samples(), 2, rank))) for rank in range(2)
    ]
    for epoch in range(3):
        seen = [indices(data.batch(step)) for data in ranks for step in range(4 * epoch, 4 * epoch + 4)]
        assert [len(batch) for batch in seen] == [3, 3, 3, 2] * 2
        assert Counter(index for batch in seen for index in batch) == Counter(range(SIZE))
    assert indices(ranks[0].batch(0)) != indices(ranks[0].batch(4)) != indices(ranks[0].batch(8))


def test_a_joiner_loads_nothing_of_earlier_steps(tmp_path: Path) -> None:
    data = session(at=4).data(DataLoader(Samples(tmp_path / "loaded"), 4))
    assert indices(data.batch(4)) == [16, 17, 18, 19]
    assert (tmp_path / "loaded").read_text().split() == ["16", "17", "18", "19"]


def test_nothing_is_loaded_twice_nor_beyond_the_last_step(tmp_path: Path) -> None:
    """Prefetching over the ends of epochs, each step done again."""
    data = session(num_steps=14).data(DataLoader(Samples(tmp_path / "loaded"), 4, num_workers=2))
    for step in range(14):
        assert indices(data.batch(step)) == indices(data.batch(step))
    assert sorted(map(int, (tmp_path / "loaded").read_text().split())) == sorted([*range(SIZE)] * 2 + [*range(8)])
    with pytest.raises(IndexError, match="beyond the last step"):
        data.batch(14)


def test_worker_processes_end_with_the_last_step() -> None:
    model = torch.nn.Linear(1, 1)
    training = api.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = training.data(DataLoader(Samples(), 4, num_workers=2))
    before = set(multiprocessing.active_children())
    for step in training.steps(3):
        with step:
            data.batch(step)
            workers = set(multiprocessing.active_children()) - before
            assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)


def test_micro_batches_share_a_step() -> None:
    data = session().data(DataLoader(Samples(), 2), micro_batches=3)
    assert [indices(data.batch(3, micro)) for micro in range(3)] == [[18, 19], [20, 21], [0, 1]]
    assert [indices(data.batch(3, micro)) for micro in (2, 0, 1)] == [[0, 1], [18, 19], [20, 21]]
    with pytest.raises(IndexError, match="micro_batches="):
        data.batch(3, 3)


def test_what_the_script_did_to_a_batch_does_not_last(tmp_path: Path) -> None:
    log = tmp_path / "loaded"
    data = session().data(DataLoader(Samples(log), 4, collate_fn=as_dict))
    batch = data.batch(2)
    wanted = batch["drawn"].clone()
    batch.pop("index")
    batch["array"] += 1
    assert data.batch(2)["index"].tolist() == [8, 9, 10, 11]
    assert data.batch(2)["array"].tolist() == [8, 9, 10, 11]
    assert len(log.read_text().split()) == 4
    batch["drawn"].mul_(2)
    assert torch.equal(data.batch(2)["drawn"], wanted), "a tensor that was changed in place is loaded again"
    data.batch(2)["drawn"].requires_grad_().sum().backward()
    assert data.batch(2)["drawn"].grad is None
    assert torch.equal(data.batch(2)["drawn"], wanted)


def as_dict(samples: list[tuple[int, float]]) -> dict[str, Any]:
    index, drawn = zip(*samples, strict=True)
    return {"index": torch.tensor(index), "array": np.array(index), "drawn": torch.tensor(drawn)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_numbers_of_the_step_are_not_moved(num_workers: int) -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.randn(()))]

    data = session().data(DataLoader(Samples(), 4, shuffle=True, num_workers=num_workers))
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    wanted = [draw() for _ in range(4)]
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    found = []
    for step in (0, 1, 7, 2):
        found.append(draw())
        data.batch(step)
    assert found == wanted


def test_generators_are_found_where_they_are_held() -> None:
    """In the transform of a data set and the arguments of a collate function."""
    outer = partial(mixed, torch.Generator())
    data = session().data(DataLoader(Samples(), 4, collate_fn=outer))
    again = session(at=3).data(DataLoader(Samples(), 4, collate_fn=outer))
    wanted = [data.batch(step) for step in range(5)]
    assert [again.batch(step) for step in (3, 4)] == wanted[3:]
    assert len(set(wanted)) == 5


def mixed(generator: torch.Generator, samples: list[Any]) -> float:
    return float(torch.rand((), generator=generator))


class Restless:
    """A sampler that counts for itself how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.asked)).tolist())


class Short(Restless):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE - 4))


class Lines(IterableDataset):
    """Samples by worker; each epoch draws its own numbers."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        info = torch.utils.data.get_worker_info()
        for index in range(info.id if info else 0, SIZE, info.num_workers if info else 1):
            yield index, random.random() + float(torch.rand(()))


class Endless(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from super().__iter__()


@pytest.mark.parametrize(
    ("kind", "num_workers"), [(DataLoader, 0), (DataLoader, 2), (StatefulDataLoader, 0), (StatefulDataLoader, 1)]
)
def test_what_has_no_indices_is_read_through(kind: type[DataLoader], num_workers: int) -> None:
    loaders = [kind(Lines(), 4, num_workers=num_workers) for _ in range(2)]
    wanted = [bits(batch) for batch in map(session().data(loaders[0]).batch, range(9))]
    found = session(at=7).data(loaders[1])
    assert [bits(found.batch(step)) for step in (7, 7, 8)] == [wanted[7], wanted[7], wanted[8]]
    for loader in loaders:
        loader._iterator = None  # a StatefulDataLoader and its iterator hold each other, see `closed`
    assert wanted[0][0] == wanted[6][0], "the second epoch begins with the same samples"
    assert wanted[0][1] != wanted[6][1], "and other numbers"


def test_a_batch_that_was_read_through_cannot_be_spoiled() -> None:
    data = session().data(Endless(Samples(), 4))
    data.batch(2)[0].zero_()
    assert indices(data.batch(2)) == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("loader", "error", "words"),
    [
        (DataLoader(Samples(), 4, sampler=Restless()), ValueError, "Restless gives another order"),
        (DataLoader(Samples(), 4, num_workers=1, in_order=False), ValueError, "in_order"),
        (iter([1, 2]), TypeError, "iterated anew"),
        (7, TypeError, "iterated anew"),
    ],
)
def test_a_loader_that_cannot_be_repeated_is_refused(loader: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        session().data(loader)


def test_a_sampler_that_misstates_its_length_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"has 5 batches and gave 4"):
        session().data(DataLoader(Samples(), 4, sampler=Short(), drop_last=True))
    data = session(50).data(DataLoader(Samples(), 1, sampler=Short()))
    with pytest.raises(RuntimeError, match=r"has 22 batches and gave 18"):
        [data.batch(step) for step in range(20)]


def test_after_an_error_of_the_data_set_the_batch_is_asked_for_again() -> None:
    class Fragile(Samples):
        def __getitem__(self, index: int) -> tuple[int, float]:
            if index == 9 and not broken:
                broken.append(index)
                raise OSError("the file server is away")
            return super().__getitem__(index)

    broken: list[int] = []
    data = session().data(DataLoader(Fragile(), 4))
    data.batch(1)
    with pytest.raises(OSError, match="away"):
        data.batch(2)
    assert indices(data.batch(2)) == [8, 9, 10, 11]


def test_a_worker_process_shows_the_data_set_of_the_user_and_ends_with_its_rank() -> None:
    data = session().data(DataLoader(Samples(), 4, num_workers=1, worker_init_fn=look, collate_fn=tell))
    kind, flag = data.batch(0)
    assert kind == "Samples"
    assert flag == 9, "SIGKILL when the parent dies"


seen_by_worker: list[str] = []


def look(worker_id: int) -> None:
    seen_by_worker.append(type(torch.utils.data.get_worker_info().dataset).__name__)


def tell(samples: list[Any]) -> tuple[str, int]:
    import ctypes

    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))
    return seen_by_worker[-1], number.value
