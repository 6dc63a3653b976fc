"""The two ends of a mirror: what comes between two of their statements, and what the machine refuses."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flashrec.runtime.errors import Superseded
from flashrec.runtime.mirrors import holder as holding
from flashrec.runtime.mirrors import shipping
from flashrec.runtime.mirrors.holder import MirrorHolder
from flashrec.runtime.mirrors.messages import Ship
from flashrec.runtime.mirrors.slots import Pair
from flashrec.runtime.transfer import Address
from flashrec.runtime.transfer.protocol import send_message
from flashrec.transport.handshake import connect_authenticated
from tests.runtime.mirroring import until
from tests.runtime.test_mirrors import SECRET, TIMEOUT_S, Link, Trained, damaged, link

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


# ---- the lock


class Owned:
    """A lock that knows who has it."""

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._owner = 0
        self._lock.release()

    @property
    def is_mine(self) -> bool:
        return self._owner == threading.get_ident()


def test_what_is_held_and_what_is_in_force_is_looked_at_and_changed_under_the_lock(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a report could name what becomes complete, or is given up, after the fence."""
    touched: set[str] = set()

    def watch(name: str) -> None:
        touched.add(name)
        assert not hasattr(holder, "_connections") or holder._lock.is_mine, name  # type: ignore[attr-defined]

    class Held(dict[int, Pair]):
        def __getattribute__(self, name: str) -> Any:
            watch("held")
            return super().__getattribute__(name)

        def __getitem__(self, rank: int) -> Pair:
            watch("held")
            return super().__getitem__(rank)

        def __delitem__(self, rank: int) -> None:
            watch("held")
            super().__delitem__(rank)

    class Guarded(MirrorHolder):
        @property
        def _generation(self) -> int:  # type: ignore[override]
            watch("generation")
            return int(self.__dict__["generation"])

        @_generation.setter
        def _generation(self, generation: int) -> None:
            watch("generation")
            self.__dict__["generation"] = generation

    for change in ("next", "versions", "of", "forget_after"):
        method = getattr(Pair, change)

        def call(pair: Pair, *args: Any, change: str = change, method: Callable[..., Any] = method) -> Any:
            if pair is not source.own:
                watch(change)
            return method(pair, *args)

        monkeypatch.setattr(Pair, change, call)
    completed = holding.Slot.complete

    def complete(slot: holding.Slot, *args: Any) -> None:
        if slot not in source.own._slots:
            watch("complete")
        completed(slot, *args)

    monkeypatch.setattr(holding.Slot, "complete", complete)
    monkeypatch.setattr(holding, "threading", SimpleNamespace(Lock=Owned, Thread=threading.Thread))
    source, holder = Trained(), Guarded.__new__(Guarded)
    holder.__init__("127.0.0.1", SECRET)  # type: ignore[misc]
    with holder._lock:
        holder._held = Held()
    link.holder = holder
    holder.accept(1)
    for v in range(3):
        assert link.end(link.ship(source.copy(v))) is None
    assert holder.versions() == {5: (1, 2)} and holder.num_bytes > 0
    holder.of(5, 2)
    holder.freeze()
    holder.forget_after(1)
    holder.drop_others(set())
    assert touched == {"held", "generation", "next", "versions", "of", "forget_after", "complete"}


def test_a_slot_has_one_writer(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former connection of a rank has ended, but bytes of it may still be on their way into the slot."""
    receive_all, writing, seen = holding.receive_all, list[socket.socket](), list[int]()
    second = threading.Event()

    def receive(connection: socket.socket, views: list[memoryview]) -> None:
        writing.append(connection)
        seen.append(len(writing))
        try:
            if len(seen) == 1:
                second.wait(0.5)  # until the next one has begun, which it must not
            else:
                second.set()
            receive_all(connection, views)
        finally:
            writing.remove(connection)

    monkeypatch.setattr(holding, "receive_all", receive)
    with connect(link) as former:
        send_message(former, Ship(5, 1, 0, 1 << 20, b""))
        until(lambda: seen)
        assert link.end(link.ship(Trained().copy(1))) is None
    assert seen == [1, 1] and link.holder.versions() == {5: (1,)}


# ---- connections


def test_one_connection_carries_all_states_of_a_generation(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each answer leaves at once."""
    source, made = Trained(), list[Any]()
    create = socket.create_connection
    monkeypatch.setattr(shipping.socket, "create_connection", lambda *a, **k: made.append(create(*a, **k)) or made[-1])
    for v in range(3):
        assert link.end(link.ship(source.copy(v))) is None
    assert len(made) == 1
    assert link.holder._connections[5].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_rank_that_is_silent_between_two_steps_stays_connected(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take as long as it likes."""
    monkeypatch.setattr(holding, "_STRANGER_TIMEOUT_S", TIMEOUT_S)
    source = Trained()
    assert link.end(link.ship(source.copy(0))) is None
    assert link.holder._connections[5].gettimeout() is None


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


def test_what_is_held_is_told_in_the_order_of_ranks(link: Link) -> None:
    for rank in (7, 5):
        link.shipper = shipping.Shipper(rank, SECRET, TIMEOUT_S, lambda generation: False)
        assert link.end(link.ship(Trained().copy(0))) is None
    assert list(link.holder.versions().items()) == [(5, (0,)), (7, (0,))]


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


def test_who_comes_while_connections_are_cut_is_refused(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is not cut any more would write on after the fence."""
    shut, errors, copying = link.holder._sockets.shut, list[BaseException | None](), Trained().copy(0)

    def shut_and_ship() -> None:
        shut()
        errors.append(link.end(link.ship(copying)))

    with monkeypatch.context() as patch:
        patch.setattr(link.holder._sockets, "shut", shut_and_ship)
        link.holder.freeze()
    assert isinstance(errors[0], ConnectionError)


def test_what_is_damaged_is_not_kept_under_the_step_that_it_was_to_be(link: Link) -> None:
    source = Trained()
    for v in range(2):
        assert link.end(link.ship(source.copy(v))) is None
    link.tamper = lambda n, _, views: damaged(views)
    assert isinstance(link.end(link.ship(source.copy(2))), ConnectionError)
    assert link.holder.versions() == {5: (1,)} and link.holder.of(5, 1).is_sound()
