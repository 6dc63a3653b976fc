"""Memory for copies of a state: one flat buffer each, laid out by the manifest. What is not complete has no step.

Of two slots one is always left alone while the other is written: the newest complete copy is never overwritten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from flashrec.runtime import codec
from flashrec.runtime.specs import TensorSpec
from flashrec.runtime.state import Manifest
from flashrec.runtime.transfer import Holding

NONE = -1  # the step of a slot that is empty, or being written
_ALIGNMENT = 64
_BLOCK = 8192  # bytes that are summed up to one number


class Places(NamedTuple):
    """views: of a buffer, each like the tensor that is to be copied there. early, later: numbers of those that a
    forward changes, and of the others."""

    views: list[torch.Tensor]
    early: list[int]
    later: list[int]

    @classmethod
    def of(cls, buffer: torch.Tensor, specs: list[TensorSpec]) -> Places:
        found, numbers = views(buffer, specs), range(len(specs))
        return cls(
            [place.view(codec.dtype_of(spec.dtype)).view(spec.shape) for place, spec in zip(found, specs, strict=True)],
            [i for i in numbers if specs[i].is_changed_by_forward],
            [i for i in numbers if not specs[i].is_changed_by_forward],
        )


class Slot:
    """One copy: `v` is its step once it is complete, `manifest` the encoded manifest, `buffer` the bytes."""

    def __init__(self, is_pinned: bool = False) -> None:
        self.v = NONE
        self.manifest = b""
        self.digest = b""
        self._is_pinned = is_pinned
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._specs: list[TensorSpec] | None = None
        self._places = Places([], [], [])

    def begin(self, size: int) -> None:
        """It is about to be written: what was in it is gone. size: bytes, from `layout`."""
        self.v = NONE
        if self.buffer.numel() != size:
            self._specs, self._places = None, Places([], [], [])
            self.buffer = torch.empty(0, dtype=torch.uint8)  # two at a time would be too many
            self.buffer = torch.zeros(size, dtype=torch.uint8, pin_memory=self._is_pinned and size > 0)

    def begin_with(self, specs: list[TensorSpec]) -> Places:
        """`begin`, and where each tensor is to go."""
        if specs == self._specs:
            self.begin(self.buffer.numel())
        else:
            self.begin(layout(specs)[1])
            self._places = Places.of(self.buffer, specs)
            self._specs = specs
        return self._places

    def complete(self, v: int, manifest: bytes, digest: bytes) -> None:
        self.manifest, self.digest = manifest, digest
        self.v = v

    def is_sound(self) -> bool:
        """The bytes are still those that were written."""
        return self.v != NONE and digest_of(self.manifest, self.buffer) == self.digest

    def holding(self) -> Holding:
        """To be sent or loaded. Raises RuntimeError when it is not sound."""
        if not self.is_sound():
            raise RuntimeError(f"the copy of step {self.v} has changed in memory: memory of this node is not sound")
        manifest = msgspec.msgpack.decode(self.manifest, type=Manifest)
        return Holding(manifest, views(self.buffer, manifest.specs()))


class Pair:
    """Two slots for the copies of one rank."""

    def __init__(self, is_pinned: bool = False) -> None:
        self._slots = (Slot(is_pinned), Slot(is_pinned))

    @property
    def num_bytes(self) -> int:
        """Memory that both occupy."""
        return sum(slot.buffer.numel() for slot in self._slots)

    def next(self) -> Slot:
        """The one to be written: not the newest complete one."""
        return min(self._slots, key=lambda slot: slot.v)

    def versions(self) -> tuple[int, ...]:
        """Steps of which there is a complete copy, ascending."""
        return tuple(sorted({slot.v for slot in self._slots} - {NONE}))

    def of(self, v: int) -> Slot:
        """Raises KeyError when there is none."""
        for slot in self._slots:
            if v != NONE and slot.v == v:
                return slot
        raise KeyError(f"there is no complete copy of step {v}, but of {self.versions()}")

    def forget_after(self, v: int) -> None:
        """Training goes on at step v: copies of later steps belong to a future that will not be."""
        for slot in self._slots:
            if slot.v > v:
                slot.v = NONE


def layout(specs: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """Where in the buffer the bytes of each tensor begin, and the size of the buffer."""
    offsets, size = [], 0
    for spec in specs:
        offsets.append(size)
        size += -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def views(buffer: torch.Tensor, specs: list[TensorSpec]) -> list[torch.Tensor]:
    """The bytes of each tensor in the buffer. Raises ValueError when they do not lie in it."""
    offsets, size = layout(specs)
    if size != buffer.numel():
        raise ValueError(f"the manifest describes {size} bytes, the buffer has {buffer.numel()}")
    return [buffer[at : at + spec.num_bytes] for at, spec in zip(offsets, specs, strict=True)]


def digest_of(manifest: bytes, buffer: torch.Tensor) -> bytes:
    """SHA-256 of the manifest and of the sum of each 8 KiB of the buffer: as fast as copying it, where SHA-256 of all
    would take several times as long. It sees every cut, every wrong block and every changed word; it does not keep out
    who makes up bytes, which the handshake does."""
    array: Any = buffer.numpy()
    whole = len(array) // _BLOCK * _BLOCK
    found = hashlib.sha256(manifest)
    found.update(len(array).to_bytes(8, "big"))
    found.update(array[:whole].view(np.uint64).reshape(-1, _BLOCK // 8).sum(axis=1))
    found.update(array[whole:])
    return found.digest()
