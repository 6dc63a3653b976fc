"""Mutual proof of the per-job secret, before the first frame of any connection (control, unix sockets, restore).

    connecting side                     accepting side
    MAGIC nonce_c (16)        ───►
                              ◄───      nonce_s (16)  mac(secret, "accept", nonce_c, nonce_s)
    mac(secret, "connect", …) ───►
                              ◄───      b"+"

The labels keep a peer from reflecting our own proof back at us. A peer that is silent, slow, garbled or without the
secret is dropped with `HandshakeRefused`; what it sent is never parsed as anything else. The secret never travels.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import stat
from pathlib import Path

MAGIC = b"FLASHREC1\n"
SECRET_BYTES = 32
NONCE_BYTES = 16
MAC_BYTES = 32
HANDSHAKE_TIMEOUT_S = 10.0
_ACCEPTED = b"+"


class HandshakeRefused(ConnectionError):
    """The other side could not prove that it knows the secret of this job (or did not accept our proof)."""


def new_secret() -> bytes:
    """A fresh per-job secret, 32 random bytes."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(path: Path, secret: bytes) -> None:
    """Store the secret so that only its owner can read it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secret.hex().encode() + b"\n")


def read_secret(path: Path) -> bytes:
    """Read the secret of this job. Refuses a file that others own or can read."""
    info = path.stat()
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise PermissionError(
            f"{path}: the job secret must belong to uid {os.geteuid()} with mode 0600, "
            f"but has uid {info.st_uid} and mode {stat.S_IMODE(info.st_mode):04o}"
        )
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{path}: not a job secret (expected {2 * SECRET_BYTES} hexadecimal digits)")
    return secret


class Connecting:
    """Sans-IO connecting side: send `hello()`, receive `reply_bytes` bytes into `prove()`, send what that returns."""

    reply_bytes = NONCE_BYTES + MAC_BYTES

    def __init__(self, secret: bytes) -> None:
        self._secret, self._nonce = secret, secrets.token_bytes(NONCE_BYTES)

    def hello(self) -> bytes:
        return MAGIC + self._nonce

    def prove(self, reply: bytes) -> bytes:
        nonce, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _mac(self._secret, b"accept", self._nonce, nonce)):
            raise HandshakeRefused("the peer does not know the secret of this job")
        return _mac(self._secret, b"connect", self._nonce, nonce)


class Accepting:
    """Sans-IO accepting side: `hello_bytes` go into `challenge()`, its result out, MAC_BYTES into `check()`."""

    hello_bytes = len(MAGIC) + NONCE_BYTES

    def __init__(self, secret: bytes) -> None:
        self._secret, self._nonce, self._peer = secret, secrets.token_bytes(NONCE_BYTES), b""

    def challenge(self, hello: bytes) -> bytes:
        if hello[: len(MAGIC)] != MAGIC:
            raise HandshakeRefused("the peer does not speak this protocol")
        self._peer = hello[len(MAGIC) :]
        return self._nonce + _mac(self._secret, b"accept", self._peer, self._nonce)

    def check(self, proof: bytes) -> bytes:
        if not hmac.compare_digest(proof, _mac(self._secret, b"connect", self._peer, self._nonce)):
            raise HandshakeRefused("the peer does not know the secret of this job")
        return _ACCEPTED


def connect_authenticated(sock: socket.socket, secret: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
    """Handshake on a connected blocking socket, connecting side. Raises HandshakeRefused; restores the time-out."""
    before = sock.gettimeout()
    sock.settimeout(timeout_s)
    try:
        side = Connecting(secret)
        sock.sendall(side.hello())
        sock.sendall(side.prove(receive_exactly(sock, side.reply_bytes)))
        if receive_exactly(sock, 1) != _ACCEPTED:
            raise HandshakeRefused("the peer did not accept our proof of the job secret")
    except TimeoutError as err:
        raise HandshakeRefused(f"no handshake within {timeout_s:g} s") from err
    finally:
        sock.settimeout(before)


def accept_authenticated(sock: socket.socket, secret: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
    """Handshake on an accepted blocking socket, accepting side. Raises HandshakeRefused; restores the time-out."""
    before = sock.gettimeout()
    sock.settimeout(timeout_s)
    try:
        side = Accepting(secret)
        sock.sendall(side.challenge(receive_exactly(sock, side.hello_bytes)))
        sock.sendall(side.check(receive_exactly(sock, MAC_BYTES)))
    except TimeoutError as err:
        raise HandshakeRefused(f"no handshake within {timeout_s:g} s") from err
    finally:
        sock.settimeout(before)


async def connect_stream(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> None:
    """`connect_authenticated` for asyncio streams."""
    try:
        async with asyncio.timeout(timeout_s):
            side = Connecting(secret)
            writer.write(side.hello())
            writer.write(side.prove(await reader.readexactly(side.reply_bytes)))
            if await reader.readexactly(1) != _ACCEPTED:
                raise HandshakeRefused("the peer did not accept our proof of the job secret")
    except TimeoutError as err:
        raise HandshakeRefused(f"no handshake within {timeout_s:g} s") from err
    except asyncio.IncompleteReadError as err:
        raise HandshakeRefused("the peer closed the connection during the handshake") from err


async def accept_stream(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> None:
    """`accept_authenticated` for asyncio streams."""
    try:
        async with asyncio.timeout(timeout_s):
            side = Accepting(secret)
            writer.write(side.challenge(await reader.readexactly(side.hello_bytes)))
            writer.write(side.check(await reader.readexactly(MAC_BYTES)))
    except TimeoutError as err:
        raise HandshakeRefused(f"no handshake within {timeout_s:g} s") from err
    except asyncio.IncompleteReadError as err:
        raise HandshakeRefused("the peer closed the connection during the handshake") from err


def _mac(secret: bytes, label: bytes, nonce_c: bytes, nonce_s: bytes) -> bytes:
    return hmac.new(secret, label + b"\0" + nonce_c + nonce_s, hashlib.sha256).digest()


def receive_exactly(
    sock: socket.socket, size: int, if_closed: str = "the peer closed the connection during the handshake"
) -> bytes:
    """Receive `size` bytes on a blocking socket. Raises HandshakeRefused(if_closed) when the peer ends before."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise HandshakeRefused(if_closed)
        data += part
    return bytes(data)
