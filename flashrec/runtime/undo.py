"""What an update changes, copied before it, so that it can be undone: for optimizers that communicate in `step()`.

A rank that is lost inside such an update cuts it on every other rank, so no rank would be left with a whole state. The
copy makes every one of them whole again. It holds all parameters that the optimizers own and their whole state, on the
device where they are, and reuses its memory in each step. State that appears in an update (the first one does that) is
removed again. Hyper-parameters are `snapshot`'s business.

The cost: as much memory again as the parameters and the optimizer state of this rank, and the time to copy that.
"""

from __future__ import annotations

from typing import Any

import torch

from flashrec.runtime import shards
from flashrec.runtime.parallel import zero
from flashrec.runtime.snapshot import freeze, num_bytes
from flashrec.runtime.timeline import logger
from flashrec.runtime.torch_private import optim

_Kept = tuple[Any, dict[Any, Any] | None, Any]  # parameter, its entries (None: it has something else), what is in them


class Undo:
    """`take` before an update, `restore` when it is not to count."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._step = -1
        self._copies: list[torch.Tensor] = []
        self._kept: list[list[_Kept]] = []  # of each optimizer
        self._num_bytes = 0

    @property
    def step(self) -> int:
        """The step whose update can be undone; -1: none."""
        return self._step

    @property
    def num_bytes(self) -> int:
        """What the copies occupy."""
        return self._num_bytes

    def take(self, step: int) -> None:
        """The update of `step` is about to begin."""
        self._step = -1  # until the copy is whole there is nothing to undo
        self._kept = [[_keep(*item) for item in zero.state_of(optimizer).items()] for optimizer in self._optimizers]
        tensors, old = self._tensors(), iter(self._copies)
        self._copies = [
            copy if (copy := next(old, None)) is not None and _is_alike(copy, tensor) else torch.empty_like(tensor)
            for tensor in tensors
        ]
        _copy(self._copies, tensors)
        self._step = step
        self._say_size()

    def restore(self) -> None:
        """Everything as `take` has found it. May be called again."""
        for optimizer, kept in zip(self._optimizers, self._kept, strict=True):
            state = zero.state_of(optimizer)
            state.clear()
            for param, entries, content in kept:
                if entries is None:
                    state[param] = freeze(content)
                    continue
                entries.clear()
                entries.update({name: _keep_value(value) for name, value in content.items()})
                state[param] = entries
        _copy(self._tensors(), self._copies)

    def forget(self) -> None:
        """This rank was given another state."""
        self._step, self._kept = -1, []

    def _tensors(self) -> list[torch.Tensor]:
        """The parameters, and the tensors that were their state when `take` was called."""
        params = {
            id(param): param
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        }
        found = [shards.local(param) for param in params.values()]
        for kept in self._kept:
            for _, entries, content in kept:
                if entries is not None:
                    found += [shards.local(value) for value in content.values() if isinstance(value, torch.Tensor)]
        return found

    def _say_size(self) -> None:
        size = num_bytes(self._copies)
        if size != self._num_bytes:
            self._num_bytes = size
            devices = ", ".join(sorted({copy.device.type for copy in self._copies}))
            logger.info(
                "before each update, parameters and optimizer state are copied: %d bytes more on %s", size, devices
            )


def _keep(param: Any, entries: Any) -> _Kept:
    if not isinstance(entries, dict):
        return param, None, freeze(entries)
    return param, entries, {name: _keep_value(value) for name, value in entries.items()}


def _keep_value(value: Any) -> Any:
    """A tensor itself (its content is copied apart, and an update may put another one in its place), or a copy."""
    return value if isinstance(value, torch.Tensor) else freeze(value)


def _is_alike(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (type(copy), copy.shape, copy.dtype, copy.device) == (
        type(tensor),
        tensor.shape,
        tensor.dtype,
        tensor.device,
    )


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Plain tensors with few calls; subclasses (quantized state) know only the copying of one."""
    pairs = list(zip(into, values, strict=True))
    plain = [(copy, value) for copy, value in pairs if type(copy) is type(value) is torch.Tensor]
    with torch.no_grad():
        optim.foreach_copy([copy for copy, _ in plain], [value for _, value in plain])
        for copy, value in pairs:
            if not type(copy) is type(value) is torch.Tensor:
                copy.copy_(value)
