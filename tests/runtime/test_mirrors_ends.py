"""The two ends of a mirror: what comes between two of their statements, and what the machine refuses."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flashrec.runtime.errors import Superseded
from flashrec.runtime.mirrors import holder as holding
from flashrec.runtime.mirrors import shipping
from flashrec.runtime.mirrors.holder import MirrorHolder
from flashrec.runtime.transfer import Address
from flashrec.transport.handshake import connect_authenticated
from tests.runtime.mirroring import until
from tests.runtime.test_mirrors import SECRET, TIMEOUT_S, Link, Trained, link

__all__ = ["link"]
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def no_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a peer does is no error of ours."""
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    yield
    assert not failed, failed


def connect(link: Link) -> socket.socket:
    connection = socket.create_connection((link.holder.address.host, link.holder.address.port), timeout=TIMEOUT_S)
    connect_authenticated(connection, SECRET)
    return connection


# ---- connections


def test_whatever_ends_a_connection_is_said_and_the_next_is_taken_in(
    link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def lines() -> list[str]:
        return [line for line in caplog.messages if "the connection from 127.0.0.1 has ended" in line]

    connect(link).close()
    until(lambda: len(lines()) == 1)
    with connect(link) as odd:
        odd.sendall(b"\0\0\0\1\xc1")
        until(lambda: len(lines()) == 2)
    assert "the other end closed" in lines()[0] and "not what is expected here" in lines()[1]
    socket.create_connection((link.holder.address.host, link.holder.address.port)).close()  # before the handshake
    until(lambda: "refused a connection from 127.0.0.1" in caplog.text)
    assert link.end(link.ship(Trained().copy(0))) is None


def test_a_connection_that_the_machine_refuses_is_not_the_last(
    link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many files are open, say: the rank comes again."""

    class Refusing(socket.socket):
        refusals = 2

        def accept(self) -> Any:
            if Refusing.refusals:
                Refusing.refusals -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    monkeypatch.setattr(holding, "_RETRY_INTERVAL_S", 0.01)
    listen = holding.listen
    monkeypatch.setattr(holding, "listen", lambda host: Refusing(fileno=listen(host).detach()))
    link.holder = MirrorHolder("127.0.0.1", SECRET)
    link.holder.accept(1)
    assert link.end(link.ship(Trained().copy(0))) is None and not Refusing.refusals
    assert caplog.text.count("mirrors: cannot take a connection in: [Errno 24] Too many open files") == 2


def test_a_listener_that_is_closed_ends_its_thread(link: Link) -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "flashrec-mirrors"}
    other = MirrorHolder("127.0.0.1", SECRET)
    (thread,) = {thread for thread in threading.enumerate() if thread.name == "flashrec-mirrors"} - before
    other._listener.shutdown(socket.SHUT_RDWR)
    other._listener.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


# ---- a fence


@pytest.mark.parametrize("rank_is_at", ["connects", "has connected"])
def test_a_fence_that_comes_while_a_rank_connects_ends_that(
    rank_is_at: str, link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To a holder that has stopped, and never says a word: what the fence has cut is not waited for."""
    create = socket.create_connection
    monkeypatch.setattr(shipping, "_CONNECT_TIMEOUT_S", TIMEOUT_S)
    stopped = socket.create_server(("127.0.0.1", 0))

    def fence() -> None:
        link.generation = 2
        link.shipper.cut()

    def connecting(*args: Any, **options: Any) -> socket.socket:
        made = create(*args, **options)
        if rank_is_at == "connects":
            fence()
        return made

    def introduce(connection: socket.socket, secret: bytes) -> None:
        assert rank_is_at == "has connected", "there is nobody who needs to know us any more"
        fence()
        connect_authenticated(connection, secret)

    monkeypatch.setattr(shipping.socket, "create_connection", connecting)
    monkeypatch.setattr(shipping, "connect_authenticated", introduce)
    with stopped:
        job = shipping.Job(Trained().copy(0), 1, lambda: Address(*stopped.getsockname()))
        link.shipper.put(job)
        assert isinstance(link.end(job), Superseded)
    assert "did not reach" not in caplog.text
