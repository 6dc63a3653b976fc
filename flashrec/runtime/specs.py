"""What is said of each tensor as it travels, and said again only where a tensor looks different than before.

A state of some thousand tensors is described in every step when it is mirrored. `Specs` remembers what it said last,
and the names and looks for which that holds. It keeps no tensor and no address, so what it remembers is either right
for the tensors at hand, whoever has replaced or moved them, or it is made anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from flashrec.runtime import codec, shards
from flashrec.runtime.snapshot import MAX_SNAPSHOT_BYTES


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One tensor as it travels. device: type only; each side uses its own index. sharding: of a DTensor, then `shape`
    is that of the local part."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    sharding: shards.Sharding | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        return _spec(name, tensor, shards.local(tensor))

    def describes(self, tensor: torch.Tensor) -> bool:
        """True if it is what would be said of `tensor`."""
        if self.sharding is not None or shards.is_dtensor(tensor):
            return TensorSpec.of(self.name, tensor) == self
        looks = tuple(tensor.shape), tensor.dtype, tensor.device.type
        return looks == (self.shape, codec.dtype_of(self.dtype), self.device)

    @property
    def is_replicated(self) -> bool:
        """Parameters and their optimizer state are equal on all replicas; buffers and objects may differ by rank."""
        return self.name.startswith(("parameter ", "optimizer "))

    @property
    def is_changed_by_forward(self) -> bool:
        """Buffers, and what objects hold, unless it is so large that it must not change before the vote."""
        return self.name.startswith("buffer ") or (
            self.name.startswith("aside ") and self.num_bytes <= MAX_SNAPSHOT_BYTES
        )

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * codec.dtype_of(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (f" {self.sharding}" if self.sharding else "")


class Specs:
    """Of one list of tensors."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._looks: Any = None
        self._found: tuple[TensorSpec, ...] = ()

    def of(
        self, names: list[str], tensors: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
    ) -> tuple[TensorSpec, ...]:
        """parts: `shards.local` of the tensors. The same object as before, if it says the same."""
        looks = _looks(tensors, parts)
        if looks != self._looks or names != self._names:
            self._found = tuple(map(_spec, names, tensors, parts))
            self._names, self._looks = names, looks
        return self._found


def _looks(tensors: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Equal only if `_spec` says the same of all of them."""
    plain = [(part.shape, part.dtype, part.device) for part in parts]
    kind: Any = shards.dtensor_class()
    if kind is None:
        return plain, []
    return plain, [
        (tensor.shape, tensor.placements, tensor.device_mesh) if isinstance(tensor, kind) else None
        for tensor in tensors
    ]


def _spec(name: str, tensor: torch.Tensor, part: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        name, tuple(part.shape), codec.dtype_name(part.dtype), part.device.type, shards.sharding_of(tensor)
    )
