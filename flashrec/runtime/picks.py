"""Which samples make up which batch: the order of a map-style data set as a function of the number of the batch.

Batches are numbered from 0 over the whole training. `Picks` yields the indices of each, epoch after epoch, and can
begin at any number: what comes before is skipped as indices, no sample of it is loaded. Each pick carries the seed of
its batch, made of (seed, epoch, number in the epoch, indices): a worker process seeds itself with it before it loads
the samples. So augmentation has the same bits whichever process loads a batch, and whatever it has loaded before.
"""

from __future__ import annotations

import ctypes
import itertools
import signal
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import torch.utils.data

from flashrec.runtime.rest import Rest
from flashrec.runtime.seed import mix
from flashrec.runtime.streams import Stream, drawn_from, held_by, seed_each

_CHUNK = 64  # batches whose indices are drawn at once
_PR_SET_PDEATHSIG = 1
_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: value.tolist())


class Pick(NamedTuple):
    """One batch to load. indices: what the loader's (batch) sampler yields, a list of them or a single one."""

    number: int
    epoch: int
    seed: int
    indices: Any


class Picks:
    """Iterable over the picks from `start` on. stop: asked for the number at which it ends; None: it does not. rest: in
    the world of this size the batches begin there, inside of an epoch (`stretches`); None: at the first of all.

    index_sampler: yields lists of indices (a batch sampler) or single ones; `set_epoch` is called on it, and on the
    sampler inside, before each epoch. Raises RuntimeError when it yields another number of batches than it has said.
    """

    def __init__(
        self, index_sampler: Any, seed: int, start: int, stop: Callable[[], int | None], rest: Rest | None = None
    ) -> None:
        self._index_sampler, self._seed, self._start, self._stop = index_sampler, seed, start, stop
        self._rest = rest

    def __iter__(self) -> Iterator[Pick]:
        number = epoch = 0
        if self._rest is not None:
            number, epoch = self._rest.number, self._rest.epoch + 1
            for count, indices in enumerate(self._rest.batches(self._index_sampler)):
                if number >= self._start:
                    if (stop := self._stop()) is not None and number >= stop:
                        return
                    yield Pick(number, epoch - 1, _seed_of(self._seed, epoch - 1, count, indices), indices)
                number += 1
        yield from self._from(epoch, number)

    def _from(self, epoch: int, number: int) -> Iterator[Pick]:
        """Whole epochs from `epoch` on, the first batch of which is `number`."""
        length = length_of(self._index_sampler)
        if length and self._start > number:
            epoch, number = epoch + (self._start - number) // length, self._start - (self._start - number) % length
        while True:
            count = 0
            for indices in self._of_epoch(epoch):
                if number >= self._start:
                    if (stop := self._stop()) is not None and number >= stop:
                        return
                    yield Pick(number, epoch, _seed_of(self._seed, epoch, count, indices), indices)
                count, number = count + 1, number + 1
            if count != (length or count) or not count:
                raise RuntimeError(
                    f"{type(self._index_sampler).__name__} said that an epoch has {length} batches and gave {count} in "
                    f"epoch {epoch}: its length must be right and the same in every epoch, or it must have none"
                )
            epoch += 1

    def _of_epoch(self, epoch: int) -> Iterator[Any]:
        stream = Stream(mix(self._seed, epoch, 0))
        with stream:
            seed_each(held_by(*_chain(self._index_sampler), depth=1), mix(self._seed, epoch, 1))
            set_epoch(self._index_sampler, epoch)
            batches = iter(self._index_sampler)
        while True:
            with stream:
                chunk = list(itertools.islice(batches, _CHUNK))
            if not chunk:
                return
            yield from chunk


class Fetch(torch.utils.data.Dataset[Any]):
    """The user's data set, asked for whole batches: `fetch[pick]` is (pick, batch)."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], is_batched: bool) -> None:
        self.dataset, self._collate_fn, self._is_batched = dataset, collate_fn, is_batched
        self._epoch = -1
        self._held: list[Any] | None = None

    def __getitem__(self, pick: Pick) -> tuple[Pick, Any]:
        if pick.epoch != self._epoch:
            set_epoch(self.dataset, pick.epoch)
            self._epoch = pick.epoch
        if self._held is None:
            self._held = held_by(self.dataset, self._collate_fn)
        is_worker = torch.utils.data.get_worker_info() is not None
        with drawn_from(pick.seed, self._held, restore=not is_worker):
            return pick, self._collate_fn(self._load(pick.indices))

    def _load(self, indices: Any) -> Any:
        if not self._is_batched:
            return self.dataset[indices]
        if load := getattr(self.dataset, "__getitems__", None):
            return load(indices)
        return [self.dataset[index] for index in indices]


class WorkerStart:
    """What a worker process of the loader does first: it ends with its rank, and shows the user's own data set.

    A process that outlives its killed rank would keep the rank's connections open, and its peers would not see it go.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None, ends_with_parent: bool) -> None:
        self._worker_init_fn, self._ends_with_parent = worker_init_fn, ends_with_parent

    def __call__(self, worker_id: int) -> None:
        if self._ends_with_parent:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        info = torch.utils.data.get_worker_info()
        if info is not None and isinstance(info.dataset, Fetch):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses to be changed, but is ours
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


def length_of(index_sampler: Any) -> int | None:
    """Batches of an epoch; None: it does not say."""
    try:
        return len(index_sampler) or None
    except (TypeError, NotImplementedError):
        return None


def set_epoch(thing: Any, epoch: int) -> None:
    """Tell a sampler, those inside of it, or a data set."""
    for part in _chain(thing):
        if callable(tell := getattr(part, "set_epoch", None)):
            tell(epoch)


def as_it_is(value: Any) -> Any:
    """The collate function of a loader whose data set gives whole batches."""
    return value


def _seed_of(seed: int, epoch: int, count: int, indices: Any) -> int:
    try:
        digest = zlib.crc32(_encoder.encode(indices))
    except (TypeError, AttributeError, ValueError, OverflowError):
        digest = 0  # indices of an unknown kind: ranks then differ by what they load only
    return mix(mix(seed, epoch, 2), count, digest)


def _chain(sampler: Any) -> list[Any]:
    """A (batch) sampler, the one inside of it, and so on."""
    found: list[Any] = []
    while sampler is not None and all(sampler is not known for known in found):
        found.append(sampler)
        inside = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inside is None else inside
    return found
