"""The tree of connections over which votes are counted: real sockets, each rank a thread of this process."""

from __future__ import annotations

import dataclasses
import random
import socket
import struct
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from flashrec.runtime import tree
from flashrec.runtime.board import Board
from flashrec.runtime.errors import Superseded, is_communication, peers_named_by
from flashrec.runtime.limits import Limits
from flashrec.runtime.progress import Progress
from flashrec.runtime.transfer import Sockets
from flashrec.runtime.tree import Tree, Trees
from flashrec.transport.handshake import SECRET_BYTES, connect_authenticated

LIMITS = Limits(connect_timeout_s=20, resume_timeout_s=20)
SECRET = b"s" * SECRET_BYTES


@dataclasses.dataclass
class Ranks:
    """As many ranks as a test wants, each with what `Tree` needs of a worker."""

    workers: list[Any]

    def all(self, do: Callable[[int], Any]) -> list[Any]:
        """What `do` returns, or the error that it raises, for each rank; all at once."""
        found: list[Any] = [None] * len(self.workers)

        def run(rank: int) -> None:
            try:
                found[rank] = do(rank)
            except Exception as err:
                found[rank] = err

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(self.workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        return found

    def connect(self) -> list[Tree]:
        trees = [Tree(worker, 1) for worker in self.workers]
        assert self.all(lambda rank: trees[rank].connect()) == [None] * len(trees)
        return trees


@pytest.fixture
def make_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Ranks]:
    def make(world_size: int) -> Ranks:
        known: list[tuple[str, int]] = []
        met = threading.Barrier(world_size)

        def exchange(address: tuple[str, int]) -> list[tuple[str, int]]:
            rank = int(threading.current_thread()._args[0])  # type: ignore[attr-defined]
            with lock:
                known.append((rank, address))  # type: ignore[arg-type]
            met.wait(20)
            return [found for _, found in sorted(known)]  # type: ignore[misc]

        lock = threading.Lock()
        monkeypatch.setattr(tree, "_exchange", exchange)
        return Ranks([_worker(rank, world_size) for rank in range(world_size)])

    return make


def _worker(rank: int, world_size: int) -> Any:
    welcome = types.SimpleNamespace(address="127.0.0.1")
    return types.SimpleNamespace(
        rank=rank, env=types.SimpleNamespace(rank=rank, world_size=world_size), secret=SECRET, limits=LIMITS,
        control=types.SimpleNamespace(welcome=welcome), sockets=Sockets(), board=Board(1, False),
        progress=Progress(rank=rank, incarnation=1, generation=1), groups=types.SimpleNamespace(timeout_s=0.0),
    )  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2, 9, 10, 80])
def test_all_ranks_are_counted_and_all_learn_it(make_ranks, world_size: int) -> None:
    trees = make_ranks(world_size).connect()
    ranks = Ranks([each._worker for each in trees])
    for step in (5, 6):
        assert ranks.all(lambda rank, step=step: trees[rank].count(step, rank % 3 == 1)) == (
            [(world_size, len(range(1, world_size, 3)))] * world_size
        )
    assert max(len(each._children) for each in trees) <= tree.FANOUT


@pytest.mark.parametrize("world_size", [2, 3, 10])
def test_whoever_comes_last_knows_the_result_at_once(make_ranks, world_size: int) -> None:
    """All others have told it what it lacks: neither it nor what it does next waits for anybody."""
    ranks = make_ranks(world_size)
    trees, last = ranks.connect(), world_size - 1
    met = threading.Barrier(world_size)

    def vote(rank: int) -> tuple[int, int] | bool:
        if rank != last:
            met.wait(20)
            return trees[rank].count(3, True)
        met.wait(20)
        (parent,) = trees[last]._neighbours
        frame = parent.recv(100, socket.MSG_PEEK)
        assert trees[last].count(3, False) == (world_size, last)
        return struct.unpack("<qii", frame) == (3, last, last)

    assert ranks.all(vote) == [(world_size, last)] * last + [True]


def test_a_vote_without_the_others_ends_after_the_limit(make_ranks) -> None:
    ranks = make_ranks(3)
    for worker in ranks.workers:
        worker.limits = dataclasses.replace(LIMITS, resume_timeout_s=0.2)
    trees = ranks.connect()
    found = ranks.all(lambda rank: trees[0].count(3, False) if rank == 0 else None)
    assert "the vote of step 3 was cut: timed out" in str(found[0])


def test_a_leaf_does_not_wait_for_ever_either(make_ranks) -> None:
    """Neither for what it is to hear nor, when nobody takes it, for what it says. The kernel has the limit."""
    ranks = make_ranks(2)
    for worker in ranks.workers:
        worker.limits = dataclasses.replace(LIMITS, resume_timeout_s=0.3)
    trees = ranks.connect()
    found = ranks.all(lambda rank: trees[1].count(3, False) if rank else None)
    assert "the vote of step 3 was cut: timed out" in str(found[1]) and is_communication(found[1])
    more_than_fits = memoryview(bytearray(64 << 20))
    found = ranks.all(lambda rank: None if rank else trees[0].spread(3, [more_than_fits]))
    assert "sharing in step 3 was cut: timed out" in str(found[0]) and is_communication(found[0])


def test_it_waits_as_long_as_the_groups_of_the_script(make_ranks) -> None:
    ranks = make_ranks(3)
    for worker in ranks.workers:
        worker.limits = dataclasses.replace(LIMITS, resume_timeout_s=0.1)
        worker.groups.timeout_s = 20.0
    trees = ranks.connect()

    def vote(rank: int) -> tuple[int, int]:
        time.sleep(0.5 if rank == 2 else 0.0)
        return trees[rank].count(3, False)

    assert ranks.all(vote) == [(3, 0)] * 3


def test_a_vote_that_comes_in_pieces_is_put_together(make_ranks) -> None:
    trees = make_ranks(2).connect()
    ranks = Ranks([each._worker for each in trees])

    def vote(rank: int) -> Any:
        if rank:
            return trees[1].count(3, False)
        for part in (b"\3\0\0", b"\0\0\0\0\0\1\0\0\0\1", b"\0\0\0"):
            trees[0]._children[0].sendall(part)
            time.sleep(0.05)
        return None

    assert ranks.all(vote)[1] == (2, 1)


def test_bytes_of_rank_0_come_to_all(make_ranks) -> None:
    trees = make_ranks(12).connect()
    ranks = Ranks([each._worker for each in trees])
    data = [[bytearray([rank]) * 200_000, bytearray([rank]) * 3, bytearray([rank]) * 100_000] for rank in range(12)]
    data[0] = [bytearray(random.Random(7).randbytes(len(each))) for each in data[0]]
    assert ranks.all(lambda rank: trees[rank].spread(3, list(map(memoryview, data[rank])))) == [None] * 12
    assert all(each == data[0] for each in data)


@pytest.mark.parametrize("sizes", [(5,), (16,), (7, 20), (16, 1_000)])
def test_bytes_that_come_in_pieces_are_put_together(make_ranks, sizes: tuple[int, ...]) -> None:
    trees = make_ranks(2).connect()
    ranks = Ranks([each._worker for each in trees])
    sent = struct.pack("<qq", 3, 3_000) + random.Random(7).randbytes(3_000)

    def spread(rank: int) -> None:
        if rank == 0:
            rest = memoryview(sent)
            for size in (*sizes, len(sent)):
                trees[0]._children[0].sendall(rest[:size])
                rest = rest[size:]
                time.sleep(0.05)  # else the kernel puts them together again
        else:
            trees[1].spread(3, [memoryview(data)[:1_000], memoryview(data)[1_000:]])

    data = bytearray(3_000)
    assert ranks.all(spread) == [None] * 2
    assert data == sent[16:]


def test_ranks_that_expect_other_bytes_say_so(make_ranks) -> None:
    trees = make_ranks(2).connect()
    ranks = Ranks([each._worker for each in trees])
    found = ranks.all(lambda rank: trees[rank].spread(3, [memoryview(bytearray(4 + rank))]))
    assert "rank 0 shares 4 bytes, this rank expects 5" in str(found[1])


def test_ranks_in_different_steps_do_not_count_each_other(make_ranks) -> None:
    trees = make_ranks(2).connect()
    ranks = Ranks([each._worker for each in trees])
    threading.Timer(1.0, trees[0].close).start()
    found = ranks.all(lambda rank: trees[rank].count(7 + rank, False))
    assert "another rank is in step 8, this one in step 7" in str(found[0])


def test_ranks_in_different_steps_do_not_share_either(make_ranks) -> None:
    trees = make_ranks(2).connect()
    ranks = Ranks([each._worker for each in trees])
    found = ranks.all(lambda rank: trees[rank].spread(7 + rank, [memoryview(bytearray(4))]))
    assert "another rank is in step 7, this one in step 8" in str(found[1])


def test_a_fence_ends_it_for_all(make_ranks) -> None:
    ranks = make_ranks(10)
    trees = ranks.connect()
    threading.Timer(0.3, lambda: [worker.sockets.shut() for worker in ranks.workers]).start()
    found = ranks.all(lambda rank: None if rank == 9 else trees[rank].count(3, False))  # rank 9 never votes
    assert found[9] is None
    assert all(isinstance(err, RuntimeError) and is_communication(err) for err in found[:9])
    assert not any("timed out" in str(err) for err in found)


def test_a_peer_that_is_gone_is_named(make_ranks) -> None:
    ranks = make_ranks(2)
    trees = ranks.connect()
    trees[1].close()
    found = ranks.all(lambda rank: trees[0].count(3, False) if rank == 0 else None)
    assert is_communication(found[0])
    assert peers_named_by(found[0]) == ("127.0.0.1",)


def test_whoever_does_not_know_the_secret_is_sent_away(make_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make_ranks(2)
    real = tree._exchange

    def exchange(address: tuple[str, int]) -> list[tuple[str, int]]:
        if threading.current_thread()._args[0] == 0:  # type: ignore[attr-defined]
            strangers.append(socket.create_connection(address))
            strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + b" " * 100)
        return real(address)

    strangers: list[socket.socket] = []
    monkeypatch.setattr(tree, "_exchange", exchange)
    trees = ranks.connect()
    assert strangers
    assert ranks.all(lambda rank: trees[rank].count(3, False)) == [(2, 0)] * 2
    strangers[0].close()


@pytest.mark.parametrize(("generation", "rank", "is_taken"), [(1, 1, True), (0, 1, False), (1, 2, None)])
def test_only_children_of_this_generation_are_taken(make_ranks, generation: int, rank: int, is_taken: bool) -> None:
    """None: that is an error, not somebody who was left over."""
    ranks = make_ranks(2)
    root = Tree(ranks.workers[0], 1)

    def connect(number: int) -> None:
        if number == 0:
            try:
                root.connect()
            finally:
                threading.Timer(0.5, root.close).start()
            return
        others = tree._exchange(("127.0.0.1", 0))
        with socket.create_connection(others[0]) as connection:
            connect_authenticated(connection, SECRET)
            connection.sendall(struct.pack("<qi", generation, rank))
            connection.settimeout(20)
            connection.recv(1)  # until the other end closes it
            if is_taken is False:
                with socket.create_connection(others[0]) as right:
                    connect_authenticated(right, SECRET)
                    right.sendall(struct.pack("<qi", 1, 1))
                    right.recv(1)

    found = ranks.all(connect)
    assert (found[0] is None) == (is_taken is not None)
    if is_taken is None:
        assert "rank 2 is no child of rank 0" in str(found[0])


def test_a_generation_that_is_superseded_is_not_connected(make_ranks) -> None:
    ranks = make_ranks(2)
    for worker in ranks.workers:
        worker.board.announced = 2
    trees = [Tree(worker, 1) for worker in ranks.workers]
    found = ranks.all(lambda rank: trees[rank].connect())
    assert any(isinstance(err, Superseded) for err in found)
    assert all(isinstance(err, RuntimeError) for err in found)


def test_each_generation_has_its_own_tree_and_a_failed_one_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Fake:
        def __init__(self, worker: Any, generation: int) -> None:
            self.generation, self.is_closed = generation, False
            made.append(self)

        def connect(self) -> None:
            if self.generation == 2:
                raise RuntimeError("no")

        def close(self) -> None:
            self.is_closed = True

        def spread(self, step: int, views: list[memoryview]) -> None:
            shared.append((self.generation, step))

    shared: list[tuple[int, int]] = []
    monkeypatch.setattr(tree, "Tree", Fake)
    worker = _worker(0, 1)
    trees = Trees(worker)
    assert trees.current() is trees.current()
    worker.progress.generation = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            trees.current()
    worker.progress.generation = 3
    trees.current()
    assert [each.generation for each in made] == [1, 2, 2, 3]
    assert [each.is_closed for each in made] == [True, True, True, False]
    trees.spread([])
    worker.progress.generation, worker.progress.v = 4, 7
    trees.spread([])
    assert shared == [(3, 0), (4, 7)]


def test_a_heartbeat_shows_who_waits_in_it(make_ranks) -> None:
    ranks = make_ranks(2)
    trees = ranks.connect()
    for worker in ranks.workers:
        worker.progress.has_tree = True
    seen: list[Any] = []
    threading.Timer(0.5, lambda: seen.extend(worker.progress.beat() for worker in ranks.workers)).start()
    threading.Timer(1.0, ranks.workers[0].sockets.shut).start()
    ranks.all(lambda rank: trees[0].count(3, False) if rank == 0 else None)
    assert [(beat.waiting, beat.collectives) for beat in seen] == [(True, {"vote": 2}), (None, {"vote": 1})]
    ranks.workers[0].progress.generation = 2
    assert ranks.workers[0].progress.beat().collectives == {"vote": 0}
