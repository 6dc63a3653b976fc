"""The handshake, both kinds and both sides: who has the secret gets in, everybody else is dropped, in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flashrec.transport import handshake as h

SECRET, OTHER = b"s" * 32, b"o" * 32
SHORT_S = 0.1
Refusal = BaseException | None


def _caught(call: Callable[[], object]) -> Refusal:
    try:
        call()
    except OSError as err:
        return err
    return None


def both_sync(ours: bytes, theirs: bytes) -> tuple[Refusal, Refusal]:
    """Outcome of the connecting and of the accepting side."""
    left, right = socket.socketpair()
    outcome: list[Refusal] = []

    def accept() -> None:
        outcome.append(_caught(lambda: h.accept_authenticated(right, theirs, 5)))
        right.close()

    with left:
        thread = threading.Thread(target=accept)
        thread.start()
        connecting = _caught(lambda: h.connect_authenticated(left, ours, 5))
        left.close()
        thread.join()
    return connecting, outcome[0]


def both_asyncio(ours: bytes, theirs: bytes) -> tuple[Refusal, Refusal]:
    async def play() -> tuple[Refusal, Refusal]:
        left, right = socket.socketpair()
        streams = await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)

        async def run(side, stream, secret):
            try:
                await side(*stream, secret, 5)
            except OSError as err:
                return err
            finally:
                if secret != SECRET:
                    stream[1].close()
            return None

        try:
            one = asyncio.create_task(run(h.connect_stream, streams[0], ours))
            two = asyncio.create_task(run(h.accept_stream, streams[1], theirs))
            done, _ = await asyncio.wait([one, two], return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() for task in done):
                for _, writer in streams:
                    writer.close()
            return await one, await two
        finally:
            for _, writer in streams:
                writer.close()

    return asyncio.run(play())


@pytest.mark.parametrize("both", [both_sync, both_asyncio])
def test_the_same_secret_on_both_sides(both) -> None:
    assert both(SECRET, SECRET) == (None, None)


@pytest.mark.parametrize("both", [both_sync, both_asyncio])
@pytest.mark.parametrize(("ours", "theirs"), [(OTHER, SECRET), (SECRET, OTHER), (b"", SECRET)])
def test_a_wrong_secret_fails_on_both_sides(both, ours: bytes, theirs: bytes) -> None:
    connecting, accepting = both(ours, theirs)
    assert isinstance(connecting, h.HandshakeRefused)
    assert "does not know the secret" in str(connecting)
    assert isinstance(accepting, OSError)


def test_our_own_proof_cannot_be_reflected() -> None:
    """An attacker opens a second connection to have our challenge answered by ourselves."""
    victim, oracle = h.Accepting(SECRET), h.Accepting(SECRET)
    nonce = os.urandom(h.NONCE_BYTES)
    reply = victim.challenge(h.MAGIC + nonce)
    answer = oracle.challenge(h.MAGIC + reply[: h.NONCE_BYTES])
    for proof in (reply[h.NONCE_BYTES :], answer[h.NONCE_BYTES :]):
        with pytest.raises(h.HandshakeRefused):
            victim.check(proof)
    side = h.Connecting(SECRET)
    mirrored = side.hello()[len(h.MAGIC) :] + b"\0" * h.MAC_BYTES
    with pytest.raises(h.HandshakeRefused):
        side.prove(mirrored)


def test_a_proof_is_good_once() -> None:
    """Recorded bytes of one connection open no second one."""
    client, first, second = h.Connecting(SECRET), h.Accepting(SECRET), h.Accepting(SECRET)
    proof = client.prove(first.challenge(client.hello()))
    assert first.check(proof) == b"+"
    second.challenge(client.hello())
    with pytest.raises(h.HandshakeRefused):
        second.check(proof)


GARBAGE = [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, os.urandom(4096), h.MAGIC + b"x" * 200, b""]


@pytest.mark.parametrize("sent", GARBAGE, ids=["http", "random", "magic only", "end at once"])
def test_garbage_is_refused_when_accepting(sent: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(sent)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(h.HandshakeRefused):
            h.accept_authenticated(right, SECRET, 5)
        assert right.gettimeout() is None, "the time-out is restored"
        if not sent.startswith(h.MAGIC):
            right.shutdown(socket.SHUT_WR)
            assert left.recv(1) == b"", "whoever speaks something else gets no answer"


@pytest.mark.parametrize("sent", [*GARBAGE[:2], b""], ids=["http", "random", "end at once"])
def test_garbage_is_refused_when_connecting(sent: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        right.sendall(sent)
        right.shutdown(socket.SHUT_WR)
        with pytest.raises(h.HandshakeRefused):
            h.connect_authenticated(left, SECRET, 5)


def test_a_peer_that_takes_our_proof_without_a_yes() -> None:
    left, right = socket.socketpair()
    side = h.Accepting(SECRET)

    def accept() -> None:
        right.sendall(side.challenge(right.recv(side.hello_bytes)))
        right.recv(h.MAC_BYTES)
        right.sendall(b"-")

    with left, right:
        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(h.HandshakeRefused, match="did not accept our proof"):
            h.connect_authenticated(left, SECRET, 5)
        thread.join()


@pytest.mark.parametrize("side", [h.connect_authenticated, h.accept_authenticated])
def test_silence_ends_in_time(side) -> None:
    left, right = socket.socketpair()
    with left, right, pytest.raises(h.HandshakeRefused, match=r"no handshake within 0\.1 s"):
        side(left, SECRET, SHORT_S)


@pytest.mark.parametrize("side", [h.connect_stream, h.accept_stream])
@pytest.mark.parametrize("sent", [None, b"GET / HTTP/1.1\r\n" + b"x" * 200, b"short"])
def test_silence_and_garbage_end_in_time_with_asyncio(side, sent: bytes | None) -> None:
    async def play() -> None:
        left, right = socket.socketpair()
        with right:
            reader, writer = await asyncio.open_connection(sock=left)
            if sent is not None:
                right.sendall(sent)
                right.shutdown(socket.SHUT_WR)
            with pytest.raises(h.HandshakeRefused):
                await side(reader, writer, SECRET, SHORT_S)
            writer.close()

    asyncio.run(play())


def test_the_secret_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = h.new_secret()
    h.write_secret(path, secret)
    assert path.stat().st_mode & 0o777 == 0o600
    assert h.read_secret(path) == secret
    with pytest.raises(FileExistsError):
        h.write_secret(path, secret)
    path.chmod(0o640)
    with pytest.raises(PermissionError, match="mode 0600"):
        h.read_secret(path)
    path.chmod(0o600)
    path.write_text("not hexadecimal")
    with pytest.raises(ValueError, match="not a job secret"):
        h.read_secret(path)
    path.write_text(secret.hex()[:-2])  # a full disk
    with pytest.raises(ValueError, match="not a job secret"):
        h.read_secret(path)


def test_a_secret_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError), contextlib.suppress(FileNotFoundError):
        h.write_secret(tmp_path / "secret", SECRET)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_of_somebody_else_is_refused(tmp_path: Path) -> None:
    h.write_secret(tmp_path / "secret", SECRET)
    os.chown(tmp_path / "secret", 12345, 12345)
    with pytest.raises(PermissionError, match="12345"):
        h.read_secret(tmp_path / "secret")
