"""`session.data(loader)`: the batch of a step, the same whenever and wherever it is asked for.

    data = session.data(loader)
    for step in session.steps(10_000):
        with step:
            x, y = data.batch(step)

Which samples a step reads is a function of the step alone: batch number `step * micro_batches + micro`, counted over
all epochs. So there is no position to be restored. A survivor that does a step again gets the batch that it has; a
joiner's first question is for the step at which training goes on, and its loader begins there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from flashrec.runtime.loading import Source
from flashrec.runtime.picks import Pick
from flashrec.runtime.rest import Rest
from flashrec.runtime.torch_private.tensors import version


class Data:
    """Batches by step. Ranks that never ask load nothing, and start no worker process."""

    def __init__(
        self,
        source: Source,
        micro_batches: int,
        position: Callable[[], int],
        quiet: Callable[[str], AbstractContextManager[None]],
        begins: Callable[[], tuple[int, int, int] | None] = lambda: None,
    ) -> None:
        """begins: (step, epoch, samples read) with which the batches of this world begin; None: at the first step."""
        if micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1, not {micro_batches}")
        self._source, self._per_step, self._position, self._quiet = source, micro_batches, position, quiet
        self._kept: dict[int, _Batch] = {}
        self._reading: Iterator[tuple[Pick | None, Any]] | None = None
        self._next = 0  # the number of the batch that comes next
        self._begins = begins

    def batch(self, step: int, micro: int = 0) -> Any:
        """What `step` trains on; `micro` counts the micro-batches of a step from 0.

        The same bits again while the step is not done. Raises IndexError for a micro-batch or step that there is not,
        and whatever the data set raises.
        """
        if not 0 <= micro < self._per_step:
            raise IndexError(f"micro-batch {micro} of {self._per_step}: say session.data(loader, micro_batches=…)")
        if step < 0:
            raise IndexError(f"step {int(step)}")
        number = int(step) * self._per_step + micro
        done = self._position() * self._per_step
        self._kept = {n: batch for n, batch in self._kept.items() if n >= min(done, number)}
        if number not in self._kept:
            self._read_to(number)
        elif self._kept[number].is_changed() and (pick := self._kept[number].pick) is not None:
            self._kept[number] = _Batch(pick, self._source.again(pick))
        return self._kept[number].show()

    def rigid(self) -> str:
        """Why these batches cannot be dealt out anew among more or fewer ranks; '': they can."""
        return self._source.rigid()

    def place(self, step: int) -> tuple[int, int] | None:
        """(epoch, samples of it that all ranks have read) when `step` begins; None: that cannot be said."""
        return self._source.place(step * self._per_step, self._rest())

    def forget(self) -> None:
        """The batches of the steps to come are others from now on."""
        self._kept, self._reading = {}, None

    def close(self) -> None:
        """No batch is wanted any more: the worker processes of the loader end. Left to the garbage collector, which
        finds them in a cycle with the session, torch waits 5 s for each: its queues to them are collected first."""
        self._reading = None

    def _rest(self) -> Rest | None:
        begins = self._begins()
        return None if begins is None else Rest(begins[0] * self._per_step, *begins[1:])

    def _read_to(self, number: int) -> None:
        is_near = self._reading is not None and self._next <= number < self._next + 2 * self._per_step
        try:
            if not is_near:
                self._reading = None  # its worker processes end before others begin
                with self._quiet("data"):  # indices are skipped, or a whole data set is read through
                    self._reading = self._source.read(number, self._rest())
                    self._next = number
                    self._keep_next(number)
            while number not in self._kept:
                self._keep_next(number)
        except BaseException:
            self._reading = None  # it may have lost a batch: begin again there
            raise

    def _keep_next(self, number: int) -> None:
        assert self._reading is not None
        try:
            pick, value = next(self._reading)
        except StopIteration:
            raise IndexError(f"batch {number} is beyond the last step of session.steps(…)") from None
        assert pick is None or pick.number == self._next, (pick, self._next)
        self._kept[self._next] = _Batch(pick, value)
        self._next += 1


class _Batch:
    """One batch as it was loaded. The script may change what it is shown, tensors too: that is noticed."""

    def __init__(self, pick: Pick | None, value: Any) -> None:
        self.pick, self._value = pick, value
        self._tensors = [] if pick is None else [(t, version(t), t.requires_grad) for t in _tensors(value)]

    def show(self) -> Any:
        return _copied(self._value, with_tensors=self.pick is None)

    def is_changed(self) -> bool:
        return any(
            version(tensor) != kept or tensor.requires_grad != needed or tensor.grad is not None
            for tensor, kept, needed in self._tensors
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


def _copied(value: Any, with_tensors: bool) -> Any:
    """Containers are copied, so that the script may take them apart. with_tensors: these, too."""
    if isinstance(value, torch.Tensor):
        return value.clone() if with_tensors else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_copied(item, with_tensors) for item in value))
    if type(value) in (list, tuple):
        return type(value)([_copied(item, with_tensors) for item in value])
    if type(value) is dict:
        return {key: _copied(item, with_tensors) for key, item in value.items()}
    if isinstance(value, str | bytes | int | float | None):
        return value
    return copy.deepcopy(value) if with_tensors or hasattr(value, "dtype") else copy.copy(value)
