"""Channels: every end has a reason, no peer can hold up or fill up a sender, nobody is served without the secret."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flashrec.core import events
from flashrec.transport import stream
from flashrec.transport.handshake import HandshakeRefused
from flashrec.wire import frames
from flashrec.wire import messages as m

SECRET = b"s" * 32
LIMIT_S = 10
FENCE = m.Fence(7, "why")


class Pair:
    """One served connection: `server` is the accepting channel, `client` the connecting one."""

    def __init__(self) -> None:
        self.served: asyncio.Queue[stream.Channel] = asyncio.Queue()
        self.refusals: list[str] = []
        self.over = asyncio.Event()
        self.returned = asyncio.Event()

    async def serve(self, channel) -> None:
        self.served.put_nowait(channel)
        await self.over.wait()
        self.returned.set()


def played(scene: Callable[[Pair, int], Awaitable[None]]) -> None:
    """Run a scene with a listener on a free port. No callback of the loop may fail meanwhile."""
    failed: list[dict[str, Any]] = []

    async def play() -> None:
        pair = Pair()
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: failed.append(what))
        server = await stream.listen_tcp("127.0.0.1", 0, SECRET, frames.to_manager, pair.serve, pair.refusals.append)
        async with asyncio.timeout(LIMIT_S):
            await scene(pair, server.sockets[0].getsockname()[1])
        pair.over.set()
        server.close()

    asyncio.run(play())
    assert not failed


async def connected(pair: Pair, port: int):
    client = await stream.connect_tcp("127.0.0.1", port, SECRET, frames.to_agent)
    return client, await pair.served.get()


async def drained(channel) -> list[m.Message]:
    return [message async for message in channel.messages()]


def test_messages_both_ways_and_the_end() -> None:
    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        server.send(FENCE)
        server.send(m.Resume(8))
        incoming = client.messages()
        assert [await anext(incoming), await anext(incoming)] == [FENCE, m.Resume(8)]
        client.send(events.WorkerJoined(1, 2))
        await client.drain_and_close()
        assert await drained(server) == [events.WorkerJoined(1, 2)]
        assert server.end_reason == "closed by the peer"
        server.send(FENCE)  # on a closed channel: nothing

    played(scene)


def test_our_own_end_has_our_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        server.abort("condemned: silent for 2 s")
        for _ in range(20):
            server.send(FENCE)
        assert not caplog.records, "asyncio complains about writes to what is closed"
        assert await drained(server) == []
        assert server.end_reason == "condemned: silent for 2 s"
        assert await drained(client) == []
        assert client.end_reason in ("closed by the peer", "reset by the peer")

    played(scene)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (struct.pack("!I", 2**31), "over the limit"),
        (frames.frame(b"\xc1"), "not a message of this channel"),
        (frames.frame(frames.encode(m.Stop("I am the manager"))), "not a message of this channel"),
    ],
)
def test_what_no_correct_peer_sends_ends_the_connection(sent: bytes, said: str) -> None:
    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        client.send(events.WorkerJoined(1, 2))
        client._writer.write(sent)
        assert await drained(server) in ([events.WorkerJoined(1, 2)], [])
        assert "protocol error" in server.end_reason
        assert said in server.end_reason
        assert await drained(client) == [], "the connection is closed"

    played(scene)


def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_BACKLOG_BYTES", 100_000)

    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        client._writer.transport.pause_reading()
        big = m.Fence(1, "x" * 60_000)
        for _ in range(1000):
            server.send(big)
            if server.end_reason:
                break
        assert "does not read (more than 100000 bytes are waiting)" in server.end_reason
        assert await drained(server) == []

    played(scene)


def test_whoever_cannot_prove_the_secret_is_not_served() -> None:
    async def scene(pair: Pair, port: int) -> None:
        with pytest.raises(HandshakeRefused):
            await stream.connect_tcp("127.0.0.1", port, b"o" * 32, frames.to_agent)
        while not pair.refusals:
            await asyncio.sleep(0.001)
        assert pair.refusals[0].startswith("connection from 127.0.0.1:")
        assert pair.served.empty()

    played(scene)


def test_whoever_is_no_longer_served_is_cut_off() -> None:
    async def scene(pair: Pair, port: int) -> None:
        client, _ = await connected(pair, port)
        pair.over.set()
        assert await drained(client) == []

    played(scene)


def test_a_manager_that_does_not_answer_is_given_up_in_time() -> None:
    async def play() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises((HandshakeRefused, TimeoutError)):
            await stream.connect_tcp("127.0.0.1", mute.getsockname()[1], SECRET, frames.to_agent, timeout_s=0.1)

    asyncio.run(asyncio.wait_for(play(), LIMIT_S))


def test_a_unix_socket_in_a_private_directory(tmp_path: Path) -> None:
    async def play() -> None:
        pair = Pair()
        path = stream.private_directory(tmp_path / "private") / "a.sock"
        path.write_text("left behind by a killed agent")
        server = await stream.listen_unix(path, SECRET, frames.to_manager, pair.serve, pair.refusals.append)
        reader, writer = await asyncio.open_unix_connection(str(path))
        await stream.handshake.connect_stream(reader, writer, SECRET)
        client = stream.Channel(reader, writer, frames.to_agent, "agent")
        assert client.local_address == ""
        client.send(events.WorkerJoined(1, 2))
        channel = await pair.served.get()
        async for message in channel.messages():
            assert message == events.WorkerJoined(1, 2)
            break
        client.abort("done")
        pair.over.set()
        server.close()

    asyncio.run(asyncio.wait_for(play(), LIMIT_S))
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="mode 0700"):
        stream.private_directory(tmp_path / "open")
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError):
        stream.private_directory(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    stream.private_directory(tmp_path / "x")
    os.chown(tmp_path / "x", 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to uid"):
        stream.private_directory(tmp_path / "x")


JOINED = [events.WorkerJoined(rank, 1) for rank in range(20)]


async def listening(server, heard: list, after: int = 1000) -> asyncio.Task:
    """Listen in a task; after: with message number `after` our own code fails."""

    def hear(message) -> None:
        heard.append(message)
        if len(heard) == after:
            raise AssertionError("ours")

    return asyncio.create_task(server.listen(hear))


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_channel_that_listens_misses_nothing(taken: int) -> None:
    """Neither what came before, nor what comes in pieces, nor the end."""

    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        data = b"".join(frames.framed(message) for message in JOINED)
        client.send_framed(data[:250])
        heard = [await server.receive() for _ in range(taken)]
        task = await listening(server, heard)
        for start in range(250, len(data), 7):
            client.send_framed(data[start : start + 7])
            await asyncio.sleep(0)
        await client.drain_and_close()
        await task
        assert heard == JOINED
        assert server.end_reason == "closed by the peer"

    played(scene)


def test_what_channels_that_listen_receive_in_turn_is_not_mixed_up() -> None:
    """They receive into the same buffer, and here every piece ends within a frame."""

    async def scene(pair: Pair, port: int) -> None:
        both = [await connected(pair, port) for _ in range(2)]
        heard: list[list] = [[], []]
        tasks = [await listening(server, one) for (_, server), one in zip(both, heard, strict=True)]
        said = [JOINED, JOINED[::-1]]
        whole = [b"".join(map(frames.framed, messages)) for messages in said]
        for start in range(0, len(whole[0]), 5):
            for (client, _), data in zip(both, whole, strict=True):
                client.send_framed(data[start : start + 5])
                await asyncio.sleep(0.001)
        for (client, _), task in zip(both, tasks, strict=True):
            await client.drain_and_close()
            await task
        assert heard == said

    played(scene)


def test_a_stream_that_has_ended_before_it_is_listened_to() -> None:
    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        for message in JOINED:
            client.send(message)
        heard = [await server.receive()]
        await client.drain_and_close()
        await asyncio.sleep(0.05)
        await (await listening(server, heard))
        assert heard == JOINED and server.end_reason == "closed by the peer"

    played(scene)


@pytest.mark.parametrize(
    ("garbage", "said"), [(frames.frame(b"\xc1"), "not a message"), (b"\xff" * 4, "frame of 4294967295 bytes is over")]
)
def test_garbage_ends_a_channel_that_listens(garbage: bytes, said: str) -> None:
    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        heard: list = []
        task = await listening(server, heard)
        client.send(JOINED[0])
        while not heard:
            await asyncio.sleep(0.001)
        client.send_framed(garbage)
        client.send(JOINED[1])
        await task
        assert heard == JOINED[:1] and server.end_reason.startswith(f"protocol error: {said}")
        assert await drained(client) == []

    played(scene)


def test_our_own_error_is_raised_to_who_listens() -> None:
    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        heard: list = []
        task = await listening(server, heard, after=2)
        for message in JOINED:
            client.send(message)
        with pytest.raises(AssertionError, match="ours"):
            await task
        assert len(heard) == 2

    played(scene)


def test_an_abort_ends_listening_with_its_reason() -> None:
    async def scene(pair: Pair, port: int) -> None:
        _, server = await connected(pair, port)
        task = await listening(server, [])
        await asyncio.sleep(0)
        server.abort("condemned")
        await task
        assert server.end_reason == "condemned"

    played(scene)


@pytest.mark.parametrize("taken", [0, 5])
def test_behind_garbage_nothing_is_heard(taken: int) -> None:
    """Neither of what was received before the channel was listened to, nor of what came since."""

    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        before = [*map(frames.framed, JOINED[:7]), frames.frame(b"\xc1"), frames.framed(JOINED[7])]
        client.send_framed(b"".join(before))
        heard = [await server.receive() for _ in range(taken)]
        client.send(JOINED[8])
        await asyncio.sleep(0.05)
        await (await listening(server, heard))
        assert heard == JOINED[:7] and server.end_reason.startswith("protocol error")

    played(scene)


@pytest.mark.parametrize("fails", [False, True])
def test_who_listens_no_more_hears_nothing(fails: bool) -> None:
    """Not even the rest of what came in one piece; what fails in the last moment is nobody's news."""

    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        heard: list[m.Message] = []

        def hear(message: m.Message) -> None:
            heard.append(message)
            task.cancel()
            if fails:
                raise AssertionError("ours")

        task = asyncio.create_task(server.listen(hear))
        await asyncio.sleep(0)
        client.send_framed(b"".join(map(frames.framed, JOINED)))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert heard == JOINED[:1]

    played(scene)


def test_a_stream_that_was_full_before_it_is_listened_to_is_read_on() -> None:
    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        large = m.KeyPosted(0, 1, 1, "group", "key", bytes(1 << 20), (0,))
        client.send(large)
        while not server._reader._paused:  # what has come is more than it likes to keep
            await asyncio.sleep(0.001)
        heard: list[m.Message] = []
        task = await listening(server, heard)
        client.send(JOINED[0])
        await client.drain_and_close()
        await task
        assert heard == [large, JOINED[0]]

    played(scene)


def test_who_writes_to_a_channel_that_listens_is_told_to_wait_to_go_on_and_of_the_end() -> None:
    async def scene(pair: Pair, port: int) -> None:
        client, server = await connected(pair, port)
        task = await listening(server, [])
        await asyncio.sleep(0)
        server.send_framed(bytes(16 << 20))
        drained = asyncio.create_task(server._writer.drain())
        await asyncio.sleep(0.05)
        assert not drained.done(), "the peer has not read it"
        await client._reader.readexactly(16 << 20)
        await drained
        client.abort("over")
        await task
        await server._writer.wait_closed()

    played(scene)
