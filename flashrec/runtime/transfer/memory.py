"""The bytes of a piece, for a socket: those of the tensors themselves where that is plain host memory, else a stage.

A stage holds one piece: pinned host memory for tensors of a GPU, plain memory for tensors that are not contiguous. Each
connection has one of its own, so that several pieces are staged, sent and hashed at the same time, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashrec.runtime import codec
from flashrec.runtime.specs import TensorSpec
from flashrec.runtime.transfer.pieces import BLOCKS_PER_PIECE, PIECE_BYTES, Block, Piece

_ALIGNMENT = 16  # of a block in a stage: no element is larger


class Memory:
    """The tensors of one state, as `Holding.tensors` has them."""

    def __init__(self, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        """Raises ValueError when these are not the tensors that `specs` describe."""
        self._tensors = [tensor.detach() for tensor in tensors]
        if [tensor.nbytes for tensor in self._tensors] != [spec.num_bytes for spec in specs]:
            raise ValueError("the tensors are not those of the manifest")
        self._plain = [
            codec.tensor_bytes(tensor) if tensor.device.type == "cpu" and tensor.is_contiguous() else None
            for tensor in self._tensors
        ]

    def stage(self) -> Stage:
        return Stage(self)

    def settle(self) -> None:
        """Wait for what GPUs still do with these tensors, on any of their streams."""
        for device in {tensor.device for tensor in self._tensors if tensor.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def plain(self, block: Block) -> memoryview | None:
        view = self._plain[block.tensor]
        return None if view is None else view[block.offset : block.offset + block.num_bytes]

    def part(self, block: Block) -> torch.Tensor:
        tensor = self._tensors[block.tensor]
        return tensor[block.prefix][block.start : block.stop] if tensor.dim() else tensor


class Stage:
    """What one connection needs to see pieces as bytes; of one piece at a time."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffer: torch.Tensor | None = None
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []  # part of a tensor, its place in the buffer

    def views(self, piece: Piece) -> list[memoryview]:
        """Where the bytes of `piece` are to arrive."""
        self._staged = []
        views, at = [], 0
        for block in piece.blocks:
            plain = self._memory.plain(block)
            if plain is None:
                part = self._memory.part(block)
                place = self._room(part)[at : at + block.num_bytes]
                at += -(-block.num_bytes // _ALIGNMENT) * _ALIGNMENT
                self._staged.append((part, place.view(part.dtype).view(part.shape)))
                plain = codec.tensor_bytes(place)
            views.append(plain)
        return views

    def gather(self, piece: Piece) -> list[memoryview]:
        """The bytes of `piece`; valid until the next call."""
        views = self.views(piece)
        for part, place in self._staged:
            place.copy_(part, non_blocking=True)
        self._wait()
        return views

    def scatter(self) -> None:
        """Bytes have arrived in the last `views`: take them to where they belong."""
        for part, place in self._staged:
            part.copy_(place, non_blocking=True)
        self._wait()

    def _room(self, part: torch.Tensor) -> torch.Tensor:
        if self._buffer is None:
            size = PIECE_BYTES + BLOCKS_PER_PIECE * _ALIGNMENT
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=part.device.type == "cuda")
        return self._buffer

    def _wait(self) -> None:
        for device in {part.device for part, _ in self._staged if part.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
