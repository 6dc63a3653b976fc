"""How a state is cut into pieces: what one request asks for, one digest covers, and one staging buffer has room for.

A piece is a row of blocks; a block is a whole small tensor or some rows of a large one, contiguous in row-major order.
Small tensors of one type are packed: their bytes go through one buffer, so that a thousand of them cost two calls and
one digest. Only shapes and types count, so both ends cut alike however their tensors lie in memory. Parameters and
optimizer state are the same on all replicas (decision 0031) and may come from any source of the target; buffers and
what registered objects hold may differ, and all come from one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from flashrec.runtime import codec
from flashrec.runtime.specs import TensorSpec

PIECE_BYTES = 4 << 20
BLOCKS_PER_PIECE = 512  # buffers of one system call; Linux allows 1024
PACKED_BYTES = 32 << 10  # of the largest tensor that is packed: to copy it costs less than to address it by itself


class Block(msgspec.Struct, frozen=True, gc=False):  # made by the thousand: twice as fast as a dataclass
    """`tensor[prefix][start:stop]`, or all of a tensor without dimensions. offset: in its bytes in row-major order."""

    tensor: int
    prefix: tuple[int, ...]
    start: int
    stop: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Piece:
    number: int
    blocks: tuple[Block, ...]
    is_shared: bool  # every source has it
    num_bytes: int = 0
    packed_dtype: str = ""  # of whole tensors that travel as one buffer


def cut(specs: Sequence[TensorSpec], limit: int = PIECE_BYTES) -> list[Piece]:
    """Pieces of at most `limit` bytes: first those that only one source has; large tensors in their order, then small
    ones by type."""
    sizes, is_replicated = [spec.num_bytes for spec in specs], [spec.is_replicated for spec in specs]
    pieces: list[Piece] = []
    for is_shared in (False, True):
        large: list[Block] = []
        small: dict[str, list[Block]] = {}
        for number, spec in enumerate(specs):
            size = sizes[number]
            if is_replicated[number] is not is_shared or not size:
                continue
            if size <= PACKED_BYTES and size <= limit:
                block = Block(number, (), 0, spec.shape[0] if spec.shape else 0, 0, size)
                small.setdefault(spec.dtype, []).append(block)
            else:
                large += _blocks(number, spec, limit)
        for row, size in _rows(large, limit, BLOCKS_PER_PIECE):
            pieces.append(Piece(len(pieces), row, is_shared, size))
        for dtype, blocks in small.items():
            for row, size in _rows(blocks, limit, len(blocks)):
                pieces.append(Piece(len(pieces), row, is_shared, size, dtype))
    return pieces


def _rows(blocks: list[Block], limit: int, max_blocks: int) -> Iterator[tuple[tuple[Block, ...], int]]:
    """Each with its size in bytes."""
    begin, size = 0, 0
    for i, block in enumerate(blocks):
        num_bytes = block.num_bytes
        if (size + num_bytes > limit and i > begin) or i - begin == max_blocks:
            yield tuple(blocks[begin:i]), size
            begin, size = i, 0
        size += num_bytes
    if blocks:
        yield tuple(blocks[begin:]), size


def _blocks(number: int, spec: TensorSpec, limit: int) -> Iterator[Block]:
    whole_bytes = spec.num_bytes
    if whole_bytes <= limit or not spec.shape:
        yield Block(number, (), 0, spec.shape[0] if spec.shape else 0, 0, whole_bytes)
        return
    row_bytes = [codec.dtype_of(spec.dtype).itemsize]  # of one index of each dimension, from the last one
    for length in spec.shape[:0:-1]:
        row_bytes.append(row_bytes[-1] * length)
    row_bytes.reverse()
    dim = next(i for i, num_bytes in enumerate(row_bytes) if num_bytes <= limit)
    rows, length = max(1, limit // row_bytes[dim]), spec.shape[dim]
    offset = 0
    for prefix in itertools.product(*map(range, spec.shape[:dim])):
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            num_bytes = (stop - start) * row_bytes[dim]
            yield Block(number, prefix, start, stop, offset, num_bytes)
            offset += num_bytes
