"""Where batches come from: a loader of the user, made to begin at any batch.

`ByIndex` takes a DataLoader over a map-style data set apart and builds one that loads the picks from a number on, with
worker processes that live for the whole training. `InOrder` takes whatever can only be read from its beginning.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from flashrec.runtime.picks import Fetch, Pick, Picks, WorkerStart, as_it_is, set_epoch
from flashrec.runtime.rest import Rest, place, rigid
from flashrec.runtime.seed import mix
from flashrec.runtime.streams import Stream
from flashrec.runtime.timeline import logger

_NUM_COMPARED = 16
_REPORT_INTERVAL_S = 10.0
Stop = Callable[[], int | None]


class Source(Protocol):
    """Batches by number."""

    def read(self, start: int, rest: Rest | None = None) -> Iterator[tuple[Pick | None, Any]]:
        """From number `start` on; each with its pick, if it has one. rest: where the batches of this world begin."""

    def rigid(self) -> str:
        """Why these batches cannot be dealt out anew among more or fewer ranks; '': they can."""

    def place(self, number: int, rest: Rest | None) -> tuple[int, int] | None:
        """(epoch, samples of it that all ranks have read) before batch `number`; None: that cannot be said."""

    def again(self, pick: Pick) -> Any:
        """The same batch once more."""


def source_of(loader: Any, seed: int, stop: Stop) -> Source:
    """Raises TypeError, ValueError, NotImplementedError that say what about `loader` cannot be repeated."""
    if not hasattr(loader, "__iter__") or isinstance(loader, Iterator):
        raise TypeError(f"session.data(…) takes a loader that can be iterated anew, not a {type(loader).__name__}")
    loader = _inside_of(loader)
    if not isinstance(loader, DataLoader):
        return InOrder(loader, seed)
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        raise NotImplementedError("data pipes communicate when they are iterated, which a replacement cannot do alone")
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ValueError("DataLoader(in_order=False) gives batches as they come: no step could be repeated")
    if not _iterates_as_torch(loader):
        return InOrder(loader, seed)
    if isinstance(loader.dataset, IterableDataset):
        return InOrder(_rebuilt(loader) if type(loader) is DataLoader else loader, seed)
    return ByIndex(loader, seed, stop)


def _inside_of(loader: Any) -> Any:
    """The DataLoader in one that Accelerate has prepared: its own iterator begins with a broadcast of random states,
    which a replacement cannot take part in. Its samplers share out the batches without one."""
    inside = getattr(loader, "base_dataloader", None)
    if not isinstance(inside, DataLoader):
        return loader
    if hasattr(loader, "slice_fn"):
        raise NotImplementedError(
            "this loader of Accelerate reads on rank 0 and sends the others their parts, which a replacement cannot "
            "take part in: DataLoaderConfiguration(dispatch_batches=False), or a data set with indices"
        )
    return inside


class ByIndex:
    """A loader over a map-style data set."""

    def __init__(self, loader: DataLoader[Any], seed: int, stop: Stop) -> None:
        is_batched = loader.batch_sampler is not None
        self._loader, self._seed, self._stop = loader, seed, stop
        self._index_sampler: Any = loader.batch_sampler if is_batched else loader.sampler
        self._fetch = Fetch(loader.dataset, loader.collate_fn, is_batched)

    def rigid(self) -> str:
        return rigid(self._index_sampler)

    def place(self, number: int, rest: Rest | None) -> tuple[int, int] | None:
        return None if self.rigid() else place(self._index_sampler, number, rest)

    def read(self, start: int, rest: Rest | None = None) -> Iterator[tuple[Pick | None, Any]]:
        picks: Any = Picks(self._index_sampler, self._seed, start, self._stop, rest)
        generator = torch.Generator().manual_seed(mix(self._seed, 0, 3))
        return iter(
            DataLoader(
                self._fetch, batch_size=None, sampler=picks, collate_fn=as_it_is, **_options(self._loader, generator)
            )
        )

    def again(self, pick: Pick) -> Any:
        return self._fetch[pick][1]

    def check_order(self) -> None:
        """Draw the first batches of an epoch twice. Raises ValueError when they differ."""
        chain = [self._index_sampler, getattr(self._index_sampler, "sampler", None)]
        if all(part is None or type(part).__module__.startswith(("torch.utils.data", "torchdata.")) for part in chain):
            return
        first, second = (
            list(itertools.islice(Picks(self._index_sampler, self._seed, 0, lambda: None), _NUM_COMPARED))
            for _ in range(2)
        )
        if [pick.seed for pick in first] != [pick.seed for pick in second]:
            name = type(chain[1] or chain[0]).__name__
            raise ValueError(
                f"{name} gives another order when it is asked again for epoch 0: a replacement would train on other "
                "samples. Let the order follow from set_epoch(epoch), and from generators that the sampler holds or "
                "the global ones, which are seeded before each epoch"
            )


class InOrder:
    """A loader that can only be read from its beginning: an iterable data set, or a class of the user's own."""

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader, self._seed = loader, seed

    def rigid(self) -> str:
        return "a data set without indices can only be read from its beginning"

    def place(self, number: int, rest: Rest | None) -> tuple[int, int] | None:
        return None

    def read(self, start: int, rest: Rest | None = None) -> Iterator[tuple[Pick | None, Any]]:
        number, began, reported = 0, time.monotonic(), time.monotonic()
        for epoch in itertools.count():
            count = 0
            for batch in self._epoch(epoch):
                if number >= start:
                    yield None, batch
                elif (now := time.monotonic()) - reported > _REPORT_INTERVAL_S:
                    reported = now
                    logger.warning(
                        "reading through the data to where training goes on: %d of %d batches in %.0f s. This data set "
                        "can only be read from its beginning; one with indices is skipped at once",
                        number,
                        start,
                        now - began,
                    )
                count, number = count + 1, number + 1
            if not count:
                raise RuntimeError(f"the loader gave no batch in epoch {epoch}")

    def again(self, pick: Pick) -> Any:
        raise NotImplementedError("a batch of this loader cannot be loaded a second time")

    def _epoch(self, epoch: int) -> Iterator[Any]:
        stream = Stream(mix(self._seed, epoch, 0))
        if isinstance(generator := getattr(self._loader, "generator", None), torch.Generator):
            generator.manual_seed(mix(self._seed, epoch, 3))
        with stream:
            set_epoch(getattr(self._loader, "dataset", None), epoch)
            set_epoch(self._loader, epoch)
            batches = iter(self._loader)
        while True:
            with stream:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


def _rebuilt(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader over the same iterable data set, with a generator of its own."""
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        persistent_workers=loader.persistent_workers,
        **_options(loader, torch.Generator()),
    )


def _options(loader: DataLoader[Any], generator: torch.Generator) -> dict[str, Any]:
    is_main = threading.current_thread() is threading.main_thread()
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": WorkerStart(loader.worker_init_fn, is_main) if loader.num_workers else None,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": generator,
        "prefetch_factor": loader.prefetch_factor,
    }


def _iterates_as_torch(loader: DataLoader[Any]) -> bool:
    found = type(loader).__iter__
    return found is DataLoader.__iter__ or found.__module__.startswith("torchdata.stateful_dataloader")
