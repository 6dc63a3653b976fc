"""The bytes of a piece, for a socket: those of the tensors themselves where that is plain host memory, else a stage.

A stage holds one piece: pinned host memory for tensors of a GPU, plain memory for tensors that are not contiguous, and
for small ones, which are copied there and back with one call for all. Each
connection has one of its own, so that several pieces are staged, sent and hashed at the same time, and no more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from flashrec.runtime import codec
from flashrec.runtime.specs import TensorSpec
from flashrec.runtime.torch_private.optim import foreach_copy
from flashrec.runtime.torch_private.tensors import split_like
from flashrec.runtime.transfer.pieces import BLOCKS_PER_PIECE, PIECE_BYTES, Block, Piece

_ALIGNMENT = 16  # of a block in a stage: no element is larger


class Memory:
    """The tensors of one state, as `Holding.tensors` has them."""

    def __init__(self, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        """Raises ValueError when these are not the tensors that `specs` describe."""
        self._tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
        if [tensor.nbytes for tensor in self._tensors] != [spec.num_bytes for spec in specs]:
            raise ValueError("the tensors are not those of the manifest")
        self._devices = {tensor.device for tensor in self._tensors if tensor.is_cuda}
        self._plain: dict[int, memoryview | None] = {}  # as far as somebody has asked

    def stage(self) -> Stage:
        return Stage(self)

    @property
    def is_pinned(self) -> bool:
        """What is staged has to be, for a GPU."""
        return bool(self._devices)

    def settle(self) -> None:
        """Wait for what GPUs still do with these tensors, on any of their streams."""
        for device in self._devices:
            torch.cuda.synchronize(device)

    def wait(self) -> None:
        """Wait for what this thread has queued."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def plain(self, block: Block) -> memoryview | None:
        """The memory itself, where it is a host's and contiguous."""
        if block.tensor not in self._plain:
            tensor = self._tensors[block.tensor]
            is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
            self._plain[block.tensor] = _memory_of(tensor) if is_plain else None
        view = self._plain[block.tensor]
        return None if view is None else view[block.offset : block.offset + block.num_bytes]

    def part(self, block: Block) -> torch.Tensor:
        tensor = self._tensors[block.tensor]
        return tensor[block.prefix][block.start : block.stop] if tensor.dim() else tensor

    def wholes(self, piece: Piece) -> list[torch.Tensor]:
        """The tensors of a piece that is packed, of its type."""
        dtype = codec.dtype_of(piece.packed_dtype)
        found = [self._tensors[block.tensor] for block in piece.blocks]
        return [tensor if tensor.dtype == dtype else tensor.view(dtype) for tensor in found]


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """`codec.tensor_bytes` in a fourth of the time. Valid as long as the tensor, which it does not keep alive."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class Stage:
    """What one connection needs to see pieces as bytes; of one piece at a time."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffer: torch.Tensor | None = None
        self._staged: list[torch.Tensor] = []  # parts of tensors
        self._places: list[torch.Tensor] = []  # of each, in the buffer

    def views(self, piece: Piece) -> list[memoryview]:
        """Where the bytes of `piece` are to arrive."""
        if piece.packed_dtype:
            packed = self._room()[: piece.num_bytes]
            self._staged = self._memory.wholes(piece)
            self._places = split_like(packed.view(codec.dtype_of(piece.packed_dtype)), self._staged)
            return [codec.tensor_bytes(packed)]
        self._staged, self._places = [], []
        views, at = [], 0
        for block in piece.blocks:
            plain = self._memory.plain(block)
            if plain is None:
                part = self._memory.part(block)
                place = self._room()[at : at + block.num_bytes]
                at += -(-block.num_bytes // _ALIGNMENT) * _ALIGNMENT
                self._staged.append(part)
                self._places.append(place.view(part.dtype).view(part.shape))
                plain = codec.tensor_bytes(place)
            views.append(plain)
        return views

    def gather(self, piece: Piece) -> list[memoryview]:
        """The bytes of `piece`; valid until the next call."""
        views = self.views(piece)
        if self._staged:
            foreach_copy(self._places, self._staged, non_blocking=True)
            self._memory.wait()
        return views

    def scatter(self) -> None:
        """Bytes have arrived in the last `views`: take them to where they belong."""
        if self._staged:
            foreach_copy(self._staged, self._places, non_blocking=True)
            self._memory.wait()

    def _room(self) -> torch.Tensor:
        if self._buffer is None:
            size = PIECE_BYTES + BLOCKS_PER_PIECE * _ALIGNMENT
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._memory.is_pinned)
        return self._buffer
