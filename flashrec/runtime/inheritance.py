"""What a rank puts aside for a life in a world of another size: one file in the memory of its node.

    FLASHREC1 | length of the header | header | the bytes of all pieces | digests of the header and of each piece

The header says what the bytes are; they are cut as for a transfer (`transfer.pieces`), so that neither end holds a
second copy of the state. A file gets its name when all of it is there.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec

from flashrec.runtime.errors import RecoveryFailed
from flashrec.runtime.state import Manifest, State
from flashrec.runtime.transfer.digests import DIGEST_BYTES, Digest
from flashrec.runtime.transfer.holding import Holding
from flashrec.runtime.transfer.memory import Memory
from flashrec.runtime.transfer.pieces import cut
from flashrec.runtime.transfer.protocol import advance

_MAGIC = b"FLASHREC1"
_LENGTH = struct.Struct("!Q")
_MARGIN_BYTES = 64 << 20  # left free on the node, for whatever else grows meanwhile


class Header(msgspec.Struct, frozen=True):
    """world_size: of the former world. places: for each `session.data`, epoch and samples of it that were read."""

    manifest: Manifest
    world_size: int
    places: tuple[tuple[int, int] | None, ...]


def put_aside(path: Path, header: Header, holding: Holding, num_on_node: int) -> int:
    """Write the state to `path`; returns its size. num_on_node: ranks that do the same at the same time.

    Raises OSError when there is no room: nothing is left behind then.
    """
    specs = header.manifest.specs()
    pieces, memory = cut(specs), Memory(holding.tensors, specs)
    head = msgspec.msgpack.encode(header)
    start = len(_MAGIC) + _LENGTH.size + len(head)
    size = start + DIGEST_BYTES + sum(piece.num_bytes + DIGEST_BYTES for piece in pieces)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    for older in path.parent.glob(f"{path.stem}.*"):
        older.unlink(missing_ok=True)
    _check_room(path.parent, size, num_on_node)
    memory.settle()
    draft = path.with_name(f".{path.name}")
    try:
        with draft.open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            _write(file.fileno(), [memoryview(_MAGIC + _LENGTH.pack(len(head)) + head)])
            stage, digests = memory.stage(), bytearray(_digest([memoryview(head)]))
            for piece in pieces:
                views = stage.gather(piece)
                digests += _digest(views)
                _write(file.fileno(), views)
            _write(file.fileno(), [memoryview(digests)])
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return size


def take_over(path: Path, state: State) -> Header:
    """Read `path` into `state`, which is that of a rank of another world. Raises OSError, LayoutMismatch, and
    RecoveryFailed when the file is not what was written."""
    with path.open("rb", buffering=0) as file:
        handle = file.fileno()
        header, head = _read_header(handle)
        manifest = state.in_this_world(header.manifest)
        state.prepare(manifest)
        specs = manifest.specs()
        pieces, memory = cut(specs), Memory(state.tensors(), specs)
        stage, digests = memory.stage(), bytearray(_digest([memoryview(head)]))
        for piece in pieces:
            views = stage.views(piece)
            _read(handle, views)
            digests += _digest(views)
            stage.scatter()
        kept = bytearray(len(digests))
        _read(handle, [memoryview(kept)])
    if kept != digests:
        raise RecoveryFailed(f"{path} holds other bytes than were written: the memory of this node is not sound")
    state.finish(manifest)
    return header


def _digest(views: list[memoryview]) -> bytes:
    digest = Digest()
    digest.update(views)
    return digest.value()


def _read_header(handle: int) -> tuple[Header, bytearray]:
    start = bytearray(len(_MAGIC) + _LENGTH.size)
    _read(handle, [memoryview(start)])
    (length,) = _LENGTH.unpack(start[len(_MAGIC) :])
    if start[: len(_MAGIC)] != _MAGIC or length > os.fstat(handle).st_size:
        raise RecoveryFailed("this is no state that was put aside")
    head = bytearray(length)
    _read(handle, [memoryview(head)])
    try:
        return msgspec.msgpack.decode(head, type=Header), head
    except msgspec.MsgspecError as err:
        raise RecoveryFailed(f"this is no state that was put aside: {err}") from err


def _check_room(directory: Path, size: int, num_on_node: int) -> None:
    """The memory filesystem may be larger than what is left of the memory. Raises OSError."""
    found = os.statvfs(directory)
    room = min(found.f_bavail * found.f_frsize, _available_bytes())
    wanted = num_on_node * size + _MARGIN_BYTES
    if wanted > room:
        raise OSError(
            f"{num_on_node} ranks need {wanted >> 20} MiB of the memory of this node, {room >> 20} MiB are free"
        )


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/meminfo does not say how much memory is free")


def _write(handle: int, views: list[memoryview]) -> None:
    views = [view.cast("B") for view in views if view.nbytes]
    while views:
        views = advance(views, os.writev(handle, views))


def _read(handle: int, views: list[memoryview]) -> None:
    views = [view.cast("B") for view in views if view.nbytes]
    while views:
        count = os.readv(handle, views)
        if not count:
            raise RecoveryFailed("what was put aside is cut short")
        views = advance(views, count)
