"""The pieces of a mirror, over real sockets: what is torn, damaged, of another generation or not acknowledged never
counts, and never costs the copy that does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flashrec.runtime.errors import Superseded, is_communication, peers_named_by
from flashrec.runtime.mirrors import holder as holding
from flashrec.runtime.mirrors import placement, shipping
from flashrec.runtime.mirrors.copying import Copying
from flashrec.runtime.mirrors.holder import MAX_BYTES, MirrorHolder
from flashrec.runtime.mirrors.messages import Acknowledged, Ship
from flashrec.runtime.mirrors.shipping import Job, Shipper
from flashrec.runtime.mirrors.slots import Pair, Slot, digest_of, views
from flashrec.runtime.specs import TensorSpec
from flashrec.runtime.state import State
from flashrec.runtime.transfer import load
from flashrec.runtime.transfer.protocol import send_message
from flashrec.transport.handshake import HandshakeRefused, connect_authenticated

pytestmark = pytest.mark.torch
SECRET = b"s" * 32
TIMEOUT_S = 30.0


class Trained:
    """A small model with some state of every kind; `train` changes all of it."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 8, dtype=torch.float32))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.state = State(self.model, [self.optimizer], {"scheduler": self.scheduler}, sends_random_state=False)
        self.own = Pair()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def digest(self) -> tuple[Any, ...]:
        return tuple(t.flatten().tolist() for t in self.state.tensors()), self.scheduler.state_dict()["last_epoch"]

    def copy(self, v: int) -> Copying:
        copying = Copying(self.state, v, {}, self.own.next())
        assert copying.slot.v == -1, "what is being written has no step"
        return copying


class Link:
    """A rank and its holder. cut(n): is told of the n-th ship before it is sent, and returns what is sent instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generation = 1
        self.holder = MirrorHolder("127.0.0.1", SECRET)
        self.holder.accept(1)
        self.shipper = Shipper(5, SECRET, TIMEOUT_S, lambda generation: generation < self.generation)
        self.num_sent = 0
        self.tamper: Callable[[int, socket.socket, list[memoryview]], list[memoryview]] = lambda n, link, views: views
        send_all = shipping.send_all

        def send(connection: socket.socket, views: list[memoryview]) -> None:
            self.num_sent += 1
            send_all(connection, self.tamper(self.num_sent, connection, views))

        monkeypatch.setattr(shipping, "send_all", send)

    def ship(self, copying: Copying, generation: int | None = None) -> Job:
        job = Job(copying, generation or self.generation, lambda: self.holder.address)
        self.shipper.put(job)
        return job

    def end(self, job: Job) -> BaseException | None:
        assert job.ended.wait(TIMEOUT_S)
        return job.error


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    made = Link(monkeypatch)
    yield made
    made.holder.freeze()


def damaged(views: list[memoryview]) -> list[memoryview]:
    changed = bytearray(views[0])
    changed[len(changed) // 2] ^= 1
    return [memoryview(changed)]


def test_a_mirror_is_the_state_at_the_start_of_the_step_bit_by_bit(link: Link) -> None:
    source, target = Trained(0), Trained(1)
    for v in range(3):
        wanted = source.digest()
        copying = source.copy(v)
        source.model(torch.randn(4, 8))  # changes running statistics, while the rest is still to be copied
        assert link.end(link.ship(copying)) is None
        source.train()
    assert link.holder.versions() == {5: (1, 2)} and source.own.versions() == (1, 2)
    assert load(link.holder.of(5, 2).holding(), target.state).manifest.v == 2
    assert target.digest() == wanted != source.digest()
    assert load(source.own.of(2).holding(), source.state).manifest.v == 2
    assert source.digest() == wanted


def test_what_is_cut_on_its_way_never_counts_and_leaves_the_one_before_alone(
    link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    source = Trained()
    assert link.end(link.ship(source.copy(0))) is None
    kept = link.holder.of(5, 0).buffer.clone()
    source.train()

    def cut(n: int, connection: socket.socket, views: list[memoryview]) -> list[memoryview]:
        connection.sendmsg([views[0][: len(views[0]) // 2]])
        link.generation = 2  # a fence, which explains it
        link.shipper.cut()
        return views

    link.tamper = cut
    assert isinstance(link.end(link.ship(source.copy(1))), Superseded)
    assert not [line for line in caplog.messages if "did not reach" in line], "a fence explains it, nobody is at fault"
    link.holder.freeze()
    assert link.holder.versions() == {5: (0,)}
    assert torch.equal(link.holder.of(5, 0).buffer, kept) and link.holder.of(5, 0).is_sound()


def test_what_comes_damaged_is_refused_and_sent_again(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    link.tamper = lambda n, _, views: damaged(views) if n == 1 else views
    assert link.end(link.ship(Trained().copy(4))) is None
    assert link.num_sent == 2 and link.holder.versions() == {5: (4,)} and link.holder.of(5, 4).is_sound()
    assert "is refused: it has come with other bytes than it left" in caplog.text


def test_what_always_comes_damaged_ends_with_an_error_that_names_the_holder(link: Link) -> None:
    link.tamper = lambda n, _, views: damaged(views)
    error = link.end(link.ship(Trained().copy(4)))
    assert link.num_sent == shipping.MAX_TRIES and not link.holder.versions()
    assert is_communication(error) and peers_named_by(error) == ("127.0.0.1",)
    assert "the state of step 4 did not reach the holder" in str(error)


def test_a_lost_connection_is_made_again(link: Link) -> None:
    source = Trained()
    assert link.end(link.ship(source.copy(0))) is None
    assert link.shipper._connection is not None
    link.shipper._connection.shutdown(socket.SHUT_RDWR)
    assert link.end(link.ship(source.copy(1))) is None
    assert link.holder.versions() == {5: (0, 1)}


def test_after_an_error_of_any_kind_the_next_state_goes_over_a_new_connection(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, connect = Trained(), shipping.connect_authenticated

    def fail(connection: socket.socket, secret: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(shipping, "connect_authenticated", fail)
    assert isinstance(link.end(link.ship(source.copy(0))), MemoryError)
    monkeypatch.setattr(shipping, "connect_authenticated", connect)
    assert link.end(link.ship(source.copy(1))) is None
    assert link.holder.versions() == {5: (1,)} and link.num_sent == 1


def test_a_fence_need_not_wait_for_what_is_still_on_its_way(link: Link) -> None:
    source, jobs, seen = Trained(), list[Job](), list[tuple[bool, bool]]()

    def look(n: int, connection: socket.socket, views: list[memoryview]) -> list[memoryview]:
        seen.append((jobs[0].copied.is_set(), jobs[0].ended.is_set()))
        return views

    link.tamper = look
    jobs.append(Job(source.copy(0), 1, lambda: link.holder.address))
    link.shipper.put(jobs[0])
    assert link.end(jobs[0]) is None and seen == [(True, False)]


def test_a_fence_need_not_wait_for_a_copy_that_has_failed(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError

    copying = Trained().copy(0)
    monkeypatch.setattr(copying, "finish", fail)
    job = link.ship(copying)
    assert isinstance(link.end(job), MemoryError) and job.copied.is_set()


def test_a_holder_that_is_gone_is_an_error_and_not_silence(link: Link) -> None:
    link.holder._listener.shutdown(socket.SHUT_RDWR)
    link.holder._listener.close()
    assert is_communication(link.end(link.ship(Trained().copy(0))))


def test_nothing_is_taken_in_but_in_the_generation_that_is_in_force(link: Link) -> None:
    source = Trained()
    assert link.end(link.ship(source.copy(0))) is None
    link.holder.freeze()
    assert isinstance(link.end(link.ship(source.copy(1))), ConnectionError)
    link.holder.accept(2)
    assert isinstance(link.end(link.ship(source.copy(1), generation=1)), ConnectionError)
    assert link.holder.versions() == {5: (0,)}
    assert link.end(link.ship(source.copy(1), generation=2)) is None
    assert link.holder.versions() == {5: (0, 1)}


def test_a_fence_at_the_last_moment_wins(link: Link) -> None:
    """All bytes are there, but the report has been made: it does not count."""
    copying = Trained().copy(0)

    def fence(n: int, connection: socket.socket, views: list[memoryview]) -> list[memoryview]:
        deadline = time.monotonic() + TIMEOUT_S
        while not link.holder.num_bytes:  # until it receives
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        link.holder.accept(2)
        return views

    link.tamper = fence
    assert isinstance(link.end(link.ship(copying)), ConnectionError)
    assert not link.holder.versions()


def test_later_steps_are_forgotten_when_training_goes_on_before_them(link: Link) -> None:
    source = Trained()
    for v in (3, 4):
        assert link.end(link.ship(source.copy(v))) is None
    link.holder.forget_after(3)
    source.own.forget_after(3)
    assert link.holder.versions() == {5: (3,)} and source.own.versions() == (3,)
    with pytest.raises(KeyError, match="no complete copy of step 4"):
        source.own.of(4)


def test_a_copy_that_changed_in_memory_is_not_used(link: Link) -> None:
    assert link.end(link.ship(Trained().copy(0))) is None
    link.holder.of(5, 0).buffer[100] += 1
    with pytest.raises(RuntimeError, match="copy of step 0 has changed in memory"):
        link.holder.of(5, 0).holding()


def test_a_new_connection_of_a_rank_ends_its_former_one(link: Link) -> None:
    """A rank that was cut off and comes again while its holder still waits for the rest of what it was sending."""
    with socket.create_connection((link.holder.address.host, link.holder.address.port)) as stale:
        connect_authenticated(stale, SECRET)
        send_message(stale, Ship(5, 1, 0, 1 << 20, b""))
        deadline = time.monotonic() + TIMEOUT_S
        while 5 not in link.holder._connections:
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        assert link.end(link.ship(Trained().copy(1))) is None
    assert link.holder.versions() == {5: (1,)}


def test_every_change_of_a_word_shows_in_the_digest() -> None:
    buffer = torch.arange(3 * 8192 + 100, dtype=torch.int64).to(torch.uint8)
    wanted = digest_of(b"m", buffer)
    swapped = torch.cat([buffer[8192:16384] + 1, buffer[:8192], buffer[16384:]])
    assert digest_of(b"m", torch.cat([buffer[8192:16384], buffer[:8192], buffer[16384:]])) == wanted  # equal blocks
    assert digest_of(b"m", swapped) != wanted and digest_of(b"n", buffer) != wanted
    assert digest_of(b"m", buffer[:-1]) != wanted
    for at in (0, 9000, len(buffer) - 1):
        changed = buffer.clone()
        changed[at] += 1
        assert digest_of(b"m", changed) != wanted


def test_sums_of_blocks_are_no_bytes_of_the_rest() -> None:
    zeros = torch.zeros(8192, dtype=torch.uint8)
    assert digest_of(b"", zeros) != digest_of(b"", zeros[:8])


def test_a_slot_that_is_written_again_counts_for_nothing(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment on in which a fence could ask: before the first byte of it is overwritten."""
    source, seen = Trained(), []
    for v in (0, 1):
        assert link.end(link.ship(source.copy(v))) is None
    begin = Slot.begin

    def look(slot: Slot, size: int) -> None:
        seen.append(link.holder.versions())
        begin(slot, size)

    copying = source.copy(2)
    monkeypatch.setattr(Slot, "begin", look)
    assert link.end(link.ship(copying)) is None
    assert seen == [{5: (1,)}]
    slot = link.holder.of(5, 2)
    begin(slot, slot.buffer.numel())
    assert not slot.is_sound(), "its bytes are those of before, but may be others any moment"
    with pytest.raises(KeyError):
        link.holder.of(5, -1)


def test_a_fence_ends_what_is_on_its_way_to_the_holder(link: Link) -> None:
    with socket.create_connection((link.holder.address.host, link.holder.address.port), timeout=TIMEOUT_S) as cut:
        connect_authenticated(cut, SECRET)
        send_message(cut, Ship(5, 1, 0, 1 << 20, b""))
        deadline = time.monotonic() + TIMEOUT_S
        while 5 not in link.holder._connections:
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        link.holder.freeze()
        assert cut.recv(1) == b""


def test_a_state_that_no_memory_holds_is_refused_before_any_is_taken(link: Link) -> None:
    with socket.create_connection((link.holder.address.host, link.holder.address.port), timeout=TIMEOUT_S) as liar:
        connect_authenticated(liar, SECRET)
        send_message(liar, Ship(5, 1, 0, MAX_BYTES + 1, b""))
        assert liar.recv(1) == b""
    assert link.holder._held == {}


def test_a_stranger_is_refused_with_a_line(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    address = (link.holder.address.host, link.holder.address.port)
    with (
        socket.create_connection(address, timeout=TIMEOUT_S) as stranger,
        pytest.raises((HandshakeRefused, OSError)),
    ):
        connect_authenticated(stranger, b"x" * 32)
    assert link.end(link.ship(Trained().copy(0))) is None
    deadline = time.monotonic() + TIMEOUT_S
    while "mirrors: refused a connection from 127.0.0.1" not in caplog.text:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_mirrors_of_ranks_that_another_one_holds_now_are_given_back(link: Link) -> None:
    assert link.end(link.ship(Trained().copy(0))) is None
    link.holder.drop_others({5, 6})
    assert link.holder.versions() == {5: (0,)}
    link.holder.drop_others({6})
    assert link.holder.versions() == {} and link.holder.num_bytes == 0


def test_in_another_generation_the_holder_is_asked_for_anew(link: Link) -> None:
    """It may be another one, though the connection to the former still stands."""
    source, other = Trained(), MirrorHolder("127.0.0.1", SECRET)
    assert link.end(link.ship(source.copy(0))) is None
    link.holder.accept(2), other.accept(2)
    link.holder, link.generation = other, 2
    assert link.end(link.ship(source.copy(1))) is None
    assert other.versions() == {5: (1,)}


def test_nothing_is_sent_when_a_fence_has_come_meanwhile(link: Link) -> None:
    source = Trained()
    assert link.end(link.ship(source.copy(0))) is None
    copying, link.generation = source.copy(1), 2
    assert isinstance(link.end(link.ship(copying, generation=1)), Superseded)
    assert link.num_sent == 1 and link.holder.versions() == {5: (0,)}


def test_an_answer_for_another_step_is_none(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "Acknowledged", lambda v, error: Acknowledged(v - 1, error))
    assert "an answer for step 3, not 4" in str(link.end(link.ship(Trained().copy(4))))


def test_memory_of_a_smaller_state_is_gone_before_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, kept = Slot(), list[int]()
    slot.begin_with([TensorSpec("parameter a", (10,), "float32", "cpu")])
    zeros = torch.zeros

    def look(*args: Any, **options: Any) -> torch.Tensor:
        kept.append(len(slot._places.views) + slot.buffer.numel())  # views keep memory, too
        return zeros(*args, **options)

    monkeypatch.setattr(torch, "zeros", look)
    slot.begin_with([TensorSpec("parameter a", (100,), "float32", "cpu")])
    assert kept == [0]


def test_long_names_of_nodes_that_differ_at_their_end_do_differ() -> None:
    names = [f"{'node-of-a-large-site.' * 10}{number}" for number in range(2)]
    assert placement.name_bytes(names[0]) != placement.name_bytes(names[1])
    assert {len(placement.name_bytes(name)) for name in ("", "n1", *names)} == {128}


def test_a_manifest_of_other_bytes_is_refused() -> None:
    specs = [TensorSpec("parameter a", (10,), "float32", "cpu")]
    with pytest.raises(ValueError, match="describes 64 bytes, the buffer has 128"):
        views(torch.zeros(128, dtype=torch.uint8), specs)


def test_what_is_frozen_is_not_overwritten_by_what_comes_later(link: Link) -> None:
    source = Trained()
    for v in (0, 1):
        assert link.end(link.ship(source.copy(v))) is None
    link.holder.freeze()
    assert isinstance(link.end(link.ship(source.copy(2))), ConnectionError)
    assert link.holder.versions() == {5: (0, 1)} and link.holder.of(5, 0).is_sound()
