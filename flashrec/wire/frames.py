"""Frames: a 4-byte big-endian length, then that many bytes of msgpack. The limit is checked before any allocation.

`FrameReader` is sans-IO: bytes go in, whole frames come out. A frame that is too long, or bytes that are not a message
of the expected union, raise `ProtocolError`: the peer is at fault and the connection is closed, nothing else happens.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from flashrec.wire import messages

MAX_FRAME_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()
M = TypeVar("M")


class ProtocolError(Exception):
    """The peer sent something that no correct peer sends."""


class FrameReader:
    """Cuts a byte stream into frames of at most `max_frame_bytes`."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Take received bytes (and keep none of `data` itself), return the frames that are complete now. Raises
        ProtocolError."""
        size = len(data) - _LENGTH.size
        if not self._buffer and 0 <= size <= self._max and _LENGTH.unpack_from(data) == (size,):
            return [bytes(data[_LENGTH.size :])]  # one frame: as good as always
        if self._buffer:
            self._buffer += data
            frames, end = self._cut(self._buffer)
            del self._buffer[:end]
        else:  # whole frames, which need not go through the buffer
            frames, end = self._cut(data)
            self._buffer += data[end:]
        return frames

    def _cut(self, data: bytes | bytearray | memoryview) -> tuple[list[bytes], int]:
        """Whole frames at the beginning of `data`, and where they end."""
        frames: list[bytes] = []
        start = 0
        while len(data) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data, start)
            if size > self._max:
                raise ProtocolError(f"frame of {size} bytes is over the limit of {self._max}")
            end = start + _LENGTH.size + size
            if len(data) < end:
                break
            frames.append(bytes(data[start + _LENGTH.size : end]))
            start = end
        return frames, start


def frame(payload: bytes, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Put the length before a payload. Raises ProtocolError when it is over the limit (our own fault then)."""
    if len(payload) > max_frame_bytes:
        raise ProtocolError(f"refusing to send a frame of {len(payload)} bytes (limit {max_frame_bytes})")
    return _LENGTH.pack(len(payload)) + payload


def framed(message: messages.Sendable) -> bytes:
    """One message as it goes over a connection: what is sent to many is made once. Raises ProtocolError."""
    return frame(encode(message))


def encode(message: messages.Sendable) -> bytes:
    """msgpack of one message, without the frame."""
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Decodes payloads to one closed union of messages; anything else is a ProtocolError."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, payload: bytes) -> M:
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as err:
            raise ProtocolError(f"not a message of this channel: {err}") from err
        except (RecursionError, UnicodeDecodeError) as err:
            raise ProtocolError(f"not a message: {err}") from err


to_manager: Decoder[messages.ToManager] = Decoder(messages.ToManager)
to_agent: Decoder[messages.ToAgent] = Decoder(messages.ToAgent)
to_agent_from_worker: Decoder[messages.ToAgentFromWorker] = Decoder(messages.ToAgentFromWorker)
to_worker: Decoder[messages.ToWorker] = Decoder(messages.ToWorker)
