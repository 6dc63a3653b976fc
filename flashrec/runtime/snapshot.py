"""What a step changes before its optimizer step, kept so that the step can be done again.

Buffers (batch norm), registered state objects (schedulers may be stepped before the optimizer), hyper-parameters, and
with Session(seed=None) the random generators. Parameters and optimizer state are not kept: nothing touches them
before the vote.

Buffers are copied when a step begins; those in DDP in its first forward, after DDP has made them equal to those of
rank 0 and before the module changes them: so they survive the loss of rank 0.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from flashrec.runtime import seed as seeds
from flashrec.runtime import shards
from flashrec.runtime.torch_private import optim
from flashrec.runtime.torch_private.tensors import version

logger = logging.getLogger("flashrec.runtime")
_UNCHANGING = frozenset({int, float, str, bool, bytes, type(None)})
MAX_SNAPSHOT_BYTES = 1 << 20


class Stateful(Protocol):
    """What can be registered with a Session as state: the protocol of schedulers, scalers, samplers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class _Buffers:
    """Copies of some buffers as one step found them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = [tensor for tensor in tensors if tensor.numel()]
        self._copies = [torch.empty_like(shards.local(tensor)) for tensor in self.tensors]
        self._has_copies = self.wants_copies = False

    def begin(self) -> None:
        self._has_copies, self.wants_copies = False, True

    def copy_once(self, *_: Any) -> None:
        if self.wants_copies:
            self.wants_copies = False
            optim.foreach_copy(self._copies, [shards.local(tensor.detach()) for tensor in self.tensors])
            self._has_copies = True

    def restore(self) -> None:
        if self._has_copies:
            with torch.no_grad():
                optim.foreach_copy([shards.local(tensor) for tensor in self.tensors], self._copies)

    def forget(self) -> None:
        self._has_copies = False


class Snapshot:
    """Undo of one step. `take` at its start, `restore` when it is to be done again."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        objects: Mapping[str, Stateful],
        keeps_random_state: bool,
    ) -> None:
        self._optimizers, self._objects = optimizers, objects
        self._keeps_random_state = keeps_random_state
        self._in_ddp: list[_Buffers] = []
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) and (inner := _Buffers(module.module.buffers())).tensors:
                self._in_ddp.append(inner)
                module.module.register_forward_pre_hook(inner.copy_once)
        inside = {id(buffer) for buffers in self._in_ddp for buffer in buffers.tensors}
        self._others = _Buffers(buffer for buffer in model.buffers() if id(buffer) not in inside)
        self._step = -1
        self._states: dict[str, Any] = {}
        self._changes: dict[str, bool] = {}  # name -> did its state change in every step so far
        self._hyper: list[list[dict[str, Any]]] = []
        self._random: dict[str, object] = {}
        self._kept = {name: object_ for name, object_ in objects.items() if self._is_small(name, object_)}
        self._large = {
            name: list(tensors_in(object_.state_dict())) for name, object_ in objects.items() if name not in self._kept
        }
        self._versions: dict[str, list[int]] = {}  # of the tensors of large objects

    @property
    def step(self) -> int:
        """The step whose start is kept; -1: none."""
        return self._step

    @property
    def has_large(self) -> bool:
        """Is there an object that is too large to be kept?"""
        return bool(self._large)

    def take(self, step: int) -> None:
        """`step` begins."""
        self._step = step
        changes, before, states = self._changes, self._states, {}
        for name, object_ in self._kept.items():
            states[name] = now = freeze(object_.state_dict())
            if name in before and changes.get(name, True):
                changes[name] = not is_equal(now, before[name])
        self._states = states
        if self._large:
            versions = self._versions_now()
            for name, numbers in self._versions.items():
                changes[name] = changes.get(name, True) and versions[name] != numbers
            self._versions = versions
        self._hyper.clear()
        for optimizer in self._optimizers:
            self._hyper.append(list(map(_without_params, optimizer.param_groups)))
        if self._keeps_random_state:
            self._random = seeds.state()
        for buffers in self._in_ddp:
            buffers.begin()
        if self._others.tensors:
            self._others.begin()
            self._others.copy_once()

    def close(self) -> None:
        """The step is over, or what runs now is not part of one (evaluation between steps)."""
        for buffers in self._in_ddp:
            buffers.wants_copies = False

    def restore(self) -> None:
        """Put everything back to where `take` (for buffers in DDP: the first forward after it) found it."""
        for buffers in (*self._in_ddp, self._others):
            buffers.restore()
        for name, state in self._states.items():
            self._objects[name].load_state_dict(freeze(state))
        for optimizer, groups in zip(self._optimizers, self._hyper, strict=True):
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update({key: freeze(value) for key, value in kept.items()})
        self._forget_scaler_stages()
        if self._keeps_random_state and self._random:
            seeds.set_state(self._random)

    def forget(self) -> None:
        """What was kept belongs to another state (this rank was restored): nothing can be compared with it."""
        self._step, self._states, self._hyper, self._random, self._versions = -1, {}, [], {}, {}
        for buffers in (*self._in_ddp, self._others):
            buffers.forget()
        self._forget_scaler_stages()

    def _forget_scaler_stages(self) -> None:
        for object_ in self._objects.values():
            if isinstance(object_, torch.amp.GradScaler):
                optim.forget_scaler_stage(object_)

    def left_behind(self) -> list[str]:
        """Objects that change in every step but have not changed since the start of this one.

        Before there is any experience only learning-rate schedulers are expected to change.
        """
        return [
            name
            for name, state in self._states.items()
            if self._changes.get(name, isinstance(self._objects[name], torch.optim.lr_scheduler.LRScheduler))
            and is_equal(freeze(self._objects[name].state_dict()), state)
        ] + [name for name in self._versions if self._changes.get(name) and name not in self.changed_large()]

    def changed_large(self) -> list[str]:
        """Objects that are too large to be kept and have changed in place since the start of this step."""
        now = self._versions_now()
        return [name for name, versions in self._versions.items() if versions != now[name]]

    def _versions_now(self) -> dict[str, list[int]]:
        return {name: [version(tensor) for tensor in tensors] for name, tensors in self._large.items()}

    def _is_small(self, name: str, object_: Stateful) -> bool:
        size = num_bytes(object_.state_dict())
        if size > MAX_SNAPSHOT_BYTES:
            logger.warning(
                "state[%r] holds %d bytes of tensors (limit %d): it is not put back when a step is done again; "
                "change it after optimizer.step() only",
                name,
                size,
                MAX_SNAPSHOT_BYTES,
            )
        return size <= MAX_SNAPSHOT_BYTES


def freeze(value: Any) -> Any:
    """A copy that later changes of the original do not reach."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is dict:
        return _freeze_items(value.copy())
    if kind is list:
        return value.copy() if _UNCHANGING.issuperset(map(type, value)) else list(map(freeze, value))
    if kind is tuple:
        return value if _UNCHANGING.issuperset(map(type, value)) else tuple(map(freeze, value))
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    kept = group.copy()
    del kept["params"]
    return _freeze_items(kept)


def _freeze_items(items: dict[Any, Any]) -> dict[Any, Any]:
    """The same dictionary, its values frozen."""
    for key, value in items.items():
        if type(value) not in _UNCHANGING:
            items[key] = freeze(value)
    return items


def is_equal(one: Any, other: Any) -> bool:
    """Equality of two frozen values; tensors and arrays by content."""
    if type(one) is not type(other):
        return False
    if type(one) in _UNCHANGING:
        return bool(one == other)
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return False
        for key, value in one.items():
            its = other[key]
            if type(value) in _UNCHANGING:
                if type(its) is not type(value) or its != value:
                    return False
            elif not is_equal(value, its):
                return False
        return True
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors inside a state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def num_bytes(value: Any) -> int:
    """Bytes of the tensors, arrays and byte strings inside a state."""
    if isinstance(value, dict):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    if isinstance(value, bytes | bytearray):
        return len(value)
    return int(getattr(value, "nbytes", 0))
