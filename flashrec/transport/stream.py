"""Messages over asyncio streams: one `Channel` per connection, a listener that admits only who knows the secret.

A channel never blocks its sender: `send` writes into the transport's buffer, and a peer that lets more than
`MAX_BACKLOG_BYTES` pile up is cut off (it is stopped or gone, and the detector will say so). Every end of a connection
has a reason in words.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from flashrec.transport import handshake
from flashrec.wire.frames import Decoder, FrameReader, ProtocolError, framed
from flashrec.wire.messages import Sendable

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
_READ_BYTES = 256 * 1024
M = TypeVar("M", bound=Sendable)


class Channel(Generic[M]):
    """One authenticated connection. `end_reason` says why it ended, once iteration has stopped."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: Decoder[M], name: str
    ) -> None:
        self._reader, self._writer, self._decoder, self.name = reader, writer, decoder, name
        self.end_reason = ""
        self._frames = FrameReader()
        self._payloads: collections.deque[bytes] = collections.deque()  # received and not taken yet
        _tune(writer)

    def send(self, message: Sendable) -> None:
        """Queue one message. Does nothing on a closed channel: its end is reported by the reading side."""
        self.send_framed(framed(message))

    def send_framed(self, data: bytes) -> None:
        """The same for a message that was made for many (`frames.framed`)."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            self.abort(f"does not read (more than {MAX_BACKLOG_BYTES} bytes are waiting)")
            return
        self._writer.write(data)

    async def messages(self) -> AsyncIterator[M]:
        """Yield messages until the connection ends; never raises for what a peer can cause."""
        try:
            while (message := await self.receive()) is not None:
                yield message
        finally:
            self._writer.transport.abort()

    async def receive(self) -> M | None:
        """The next message; None: the connection has ended. Never raises for what a peer can cause."""
        try:
            while not self._payloads:
                data = await self._reader.read(_READ_BYTES)
                if not data:
                    self.end_reason = self.end_reason or "closed by the peer"
                    return None
                self._payloads.extend(self._frames.feed(data))
            return self._decoder.decode(self._payloads.popleft())
        except ProtocolError as err:
            self.end_reason = f"protocol error: {err}"
        except OSError as err:
            self.end_reason = self.end_reason or _explain(err)
        return None

    async def listen(self, hear: Callable[[M], None]) -> None:
        """Give every message to `hear` as it comes, without a task that wakes up for it, until the connection ends.
        Only for connections that were accepted over TCP. Raises what `hear` raises."""
        protocol, reader = self._writer.transport.get_protocol(), self._reader
        assert isinstance(protocol, _Accepted) and isinstance(reader, _Reader)
        over = asyncio.get_running_loop().create_future()
        inbox = _Inbox(protocol, self._frames, self._decoder, hear, over)
        self._writer.transport.set_protocol(inbox)
        try:
            inbox.hear(self._payloads)
            left, is_over = reader.leave()
            inbox.take(left)
            if is_over:
                inbox.end("closed by the peer")
            else:
                self._writer.transport.resume_reading()  # type: ignore[attr-defined]
            reason = await over
            self.end_reason = self.end_reason or reason
        finally:
            self._writer.transport.abort()

    def abort(self, reason: str) -> None:
        """End the connection now, without flushing."""
        self.end_reason = self.end_reason or reason
        self._writer.transport.abort()

    async def drain_and_close(self, timeout_s: float = 1.0) -> None:
        """Flush what is queued, then end the connection; bounded."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()
        self._writer.transport.abort()

    @property
    def peer_pid(self) -> int:
        """Pid of who connected to our unix socket, as the kernel sees it from our PID namespace (0: not visible)."""
        sock = self._writer.get_extra_info("socket")
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return int(pid)

    @property
    def local_address(self) -> str:
        """Our address on this connection ('' on a unix socket)."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""


class _Reader(asyncio.StreamReader):
    """Can be left for another way to read."""

    def leave(self) -> tuple[bytes, bool]:
        """What was received and not read, and whether that was the end."""
        return bytes(self._buffer), self._eof  # type: ignore[attr-defined]


class _Accepted(asyncio.StreamReaderProtocol):
    """A stream like any other until its channel listens. buffer: where what comes from then on is received."""

    def __init__(
        self, accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], buffer: memoryview
    ) -> None:
        super().__init__(_Reader(), accept)
        self.buffer = buffer


class _Inbox(asyncio.BufferedProtocol, Generic[M]):
    """The protocol of a connection whose channel listens, in place of `stream`, which is still told of its end. over:
    gets the reason of the end, or an error of ours.

    What is received lies in a buffer that all connections share until it has been heard: a read of asyncio's streams
    makes one of 256 KiB for each message, for which the C library asks the kernel (15 µs, where a read takes 2)."""

    def __init__(
        self, stream: _Accepted, frames: FrameReader, decoder: Decoder[M], hear: Callable[[M], None],
        over: asyncio.Future[str],
    ) -> None:  # fmt: skip
        self._stream, self._frames, self._decode, self._hear, self._over = stream, frames, decoder.decode, hear, over

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._stream.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.take(self._stream.buffer[:nbytes])

    def eof_received(self) -> bool | None:
        self.end("closed by the peer")
        return self._stream.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(_explain(exc) if isinstance(exc, OSError) else "closed by the peer")
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()

    def take(self, data: bytes | memoryview) -> None:
        try:
            payloads = self._frames.feed(data)
        except ProtocolError as err:
            self.end(f"protocol error: {err}")
            return
        self.hear(payloads)

    def hear(self, payloads: Iterable[bytes]) -> None:
        try:
            for payload in payloads:
                if self._over.done():
                    return
                self._hear(self._decode(payload))
        except ProtocolError as err:
            self.end(f"protocol error: {err}")
        except Exception as err:  # ours: whoever listens has to know
            if not self._over.done():
                self._over.set_exception(err)

    def end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)


Serve = Callable[[Channel[M]], Awaitable[None]]
Refuse = Callable[[str], None]


async def listen_tcp(
    host: str | None, port: int, secret: bytes, decoder: Decoder[M], serve: Serve[M], refuse: Refuse
) -> asyncio.Server:
    """Listen on TCP. `serve` runs once per admitted connection, `refuse` gets a sentence for everyone else."""
    accept, buffer = _admitting(secret, decoder, serve, refuse), memoryview(bytearray(_READ_BYTES))
    return await asyncio.get_running_loop().create_server(lambda: _Accepted(accept, buffer), host, port, backlog=4096)


async def listen_unix(
    path: Path, secret: bytes, decoder: Decoder[M], serve: Serve[M], refuse: Refuse
) -> asyncio.Server:
    """Listen on a unix socket in a directory that only we can enter (see `private_directory`)."""
    path.unlink(missing_ok=True)
    return await asyncio.start_unix_server(_admitting(secret, decoder, serve, refuse), str(path), backlog=1024)


async def connect_tcp(host: str, port: int, secret: bytes, decoder: Decoder[M], timeout_s: float = 5.0) -> Channel[M]:
    """Connect and prove the secret. Raises OSError (HandshakeRefused included) or TimeoutError."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        await handshake.connect_stream(reader, writer, secret, timeout_s)
    except BaseException:
        writer.transport.abort()
        raise
    return Channel(reader, writer, decoder, f"{host}:{port}")


def private_directory(path: Path) -> Path:
    """Create (or check) a directory of mode 0700 that belongs to us, for sockets. Raises PermissionError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if info.st_uid != os.geteuid() or info.st_mode & 0o077 or path.is_symlink():
        raise PermissionError(f"{path} must be a directory of mode 0700 that belongs to uid {os.geteuid()}")
    return path


def _admitting(
    secret: bytes, decoder: Decoder[M], serve: Serve[M], refuse: Refuse
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        name = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "local peer"
        try:
            await handshake.accept_stream(reader, writer, secret)
        except OSError as err:
            refuse(f"connection from {name} refused: {err}")
            writer.transport.abort()
            return
        channel = Channel(reader, writer, decoder, name)
        try:
            await serve(channel)
        finally:
            channel.abort("no longer served")

    return accept


def _tune(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _explain(err: OSError) -> str:
    if isinstance(err, ConnectionResetError):
        return "reset by the peer"
    return os.strerror(err.errno) if err.errno else (str(err) or type(err).__name__)
