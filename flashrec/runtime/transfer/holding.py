"""What a source sends: a manifest and the memory that it describes. From a live state, or kept in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashrec.runtime.state import Manifest, State


@dataclass(frozen=True)
class Holding:
    """A whole state at `manifest.v`. tensors: one for each of `manifest.specs()`, in that order, either like it or its
    bytes in row-major order: contiguous uint8 in host memory, at a multiple of the element size."""

    manifest: Manifest
    tensors: Sequence[torch.Tensor]

    @classmethod
    def of(cls, state: State, v: int, parts: dict[str, bytes]) -> Holding:
        """The live state of this rank; no copies. Raises CannotEncode."""
        manifest = state.manifest(v, parts)
        return cls(manifest, state.tensors())
