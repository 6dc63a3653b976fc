"""Parts that need no second process: environment, board, addresses, seeds, snapshots, what torch must have."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flashrec.core.types import Plan
from flashrec.runtime import environment, gloo, stuck
from flashrec.runtime import seed as seeds
from flashrec.runtime.board import Board
from flashrec.runtime.errors import Superseded, UnsupportedTorch, WaitedTooLong, is_communication, peers_named_by
from flashrec.runtime.farewell import fingerprint
from flashrec.runtime.parallel.part import Parts
from flashrec.runtime.snapshot import Snapshot
from flashrec.runtime.torch_private import groups, versions
from flashrec.wire import messages as m

FULL = {
    "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "FLASHREC_SOCKET": "/run/x", "FLASHREC_SECRET_FILE": "/run/s",
    "FLASHREC_INCARNATION": "3", "FLASHREC_GENERATION": "4", "FLASHREC_JOINS": "1",
}  # fmt: skip


# ---- parts of a session


class _Says:
    """A part that has only what a test gives it."""

    def __init__(self, name: str, told: list[str], *calls: str) -> None:
        self.name = name
        for call in calls:
            setattr(self, call, lambda step, call=call: told.append(f"{name} {call} {step}"))


def test_all_parts_look_before_one_of_them_waits_for_others() -> None:
    told: list[str] = []
    both = ("check", "before_vote")
    parts = Parts([_Says("b", told, *both), _Says("c", told), _Says("d", told, "check"), _Says("a", told, *both)])
    parts.before_vote(3)
    assert told == ["a check 3", "b check 3", "d check 3", "a before_vote 3", "b before_vote 3"]


# ---- environment


def test_environment() -> None:
    assert environment.read({}) is None
    found = environment.read(FULL)
    assert found is not None and (found.rank, found.incarnation, found.generation, found.joins) == (1, 3, 4, True)


@pytest.mark.parametrize("name", sorted(FULL.keys() - {"FLASHREC_SOCKET", "FLASHREC_JOINS"}))
def test_environment_that_lacks_something(name: str) -> None:
    with pytest.raises(environment.BadEnvironment, match=name):
        environment.read({key: value for key, value in FULL.items() if key != name})


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("RANK", "2"), ("WORLD_SIZE", "-1")])
def test_environment_that_makes_no_sense(name: str, value: str) -> None:
    with pytest.raises(environment.BadEnvironment):
        environment.read(FULL | {name: value})


# ---- board


def test_messages_of_an_older_generation_are_dropped() -> None:
    board = Board(3, is_joiner=True)
    assert board.deliver(m.Fence(4, "x"))
    board.deliver(m.PlanPublished(Plan(3, 0, (), {}, "")))
    board.deliver(m.KeysPushed(3, "g", {"k": b"old"}, (0,)))
    board.deliver(m.Resume(3))
    assert not board.deliver(m.Fence(4, "again")) and not board.deliver(m.Fence(2, "late"))
    assert not board.has_keys(3, "g", ["k"])
    for wait in (lambda: board.wait_plan(4, 0.01), lambda: board.wait_resume(4, 0.01)):
        with pytest.raises(WaitedTooLong, match="generation 4"):
            wait()


def test_waiting_for_an_older_generation_ends_at_once() -> None:
    board = Board(3, is_joiner=True)
    board.deliver(m.Fence(4, "x"))
    for wait in (lambda: board.wait_plan(3, 60), lambda: board.wait_keys(3, "g", ["k"], 60)):
        with pytest.raises(Superseded):
            wait()


def test_a_fence_before_the_first_resume_dooms() -> None:
    board = Board(1, is_joiner=False)
    assert not board.deliver(m.Fence(2, "x"))
    assert board.doomed and board.announced == 1
    started = Board(1, is_joiner=False)
    started.deliver(m.Resume(1))
    assert started.deliver(m.Fence(2, "x")) and started.announced == 2


def test_tables_are_forgotten() -> None:
    board = Board(1, is_joiner=True)
    board.post(1, "g", "k", b"1")
    board.post(2, "g", "k", b"2")
    board.forget_before(2)
    assert [generation for generation, _, _ in board.tables()] == [2]


# ---- gloo


def blob(family: int, address: bytes, port: int) -> bytes:
    if family == socket.AF_INET:
        name = struct.pack("=H", family) + struct.pack("!H", port) + address + bytes(120)
    else:
        name = struct.pack("=H", family) + struct.pack("!HI", port, 0) + address + bytes(104)
    return struct.pack("=Q", 4) + b"node" + struct.pack("=Q", len(name)) + name


def test_addresses_of_gloo() -> None:
    four = blob(socket.AF_INET, socket.inet_aton("10.1.2.3"), 4711)
    six = blob(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, "fe80::7"), 4712)
    assert gloo.addresses([four, six, b"", b"x" * 7, b"\xff" * 200, bytes(8)]) == {
        ("10.1.2.3", 4711),
        ("fe80::7", 4712),
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_connections_at_known_addresses_are_shut(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    pairs = []
    for _ in range(2):
        server = socket.create_server((host, 0), family=family)
        client = socket.create_connection(server.getsockname()[:2])
        pairs.append((server, client, server.accept()[0]))
    (server, client, accepted), (_, other, other_accepted) = pairs
    known = {server.getsockname()[:2]}
    assert len(gloo.connections(known)) == 2  # both ends are ours here
    kept = gloo.shut(known)
    assert len(kept) == 2
    assert accepted.recv(1) == b"" and client.recv(1) == b""
    accepted.close()  # as gloo does when it sees the end of the stream …
    client.sendall(b"x")
    client.sendall(b"x")  # … and yet no write of a peer fails, or gloo would lose the operation
    other.sendall(b"x")
    assert other_accepted.recv(1) == b"x"
    for end in (*kept, *pairs[0], *pairs[1]):
        end.close()


def test_a_waiting_operation_is_seen_in_gloos_threads() -> None:
    store, backends = torch.distributed.HashStore(), {}

    def connect(rank: int) -> None:
        device = groups.gloo_device("127.0.0.1", "")
        backends[rank] = groups.gloo_backend(store, rank, 2, device, 10, timedelta(seconds=60))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def becomes(wanted: bool) -> bool:
        deadline = time.monotonic() + 10
        while stuck.is_idle() is not wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        return stuck.is_idle() is wanted

    assert becomes(True)
    first = backends[0].allreduce([torch.ones(1)])
    assert becomes(False) and stuck.waiting_operations()
    backends[1].allreduce([torch.ones(1)]).wait()
    first.wait()
    assert becomes(True)


# ---- torch


def test_this_torch_has_what_is_needed() -> None:
    assert versions.self_test()


def test_what_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_has", lambda owner, name: name != "_reset_state")
    with pytest.raises(UnsupportedTorch, match=r"lacks _reset_state; .* torch >=2.13,<2.15"):
        versions.self_test()


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    with pytest.raises(UnsupportedTorch, match=r"torch 2\.15\.0 is not supported .* torch >=2.13,<2.15"):
        versions.self_test()


def test_a_release_that_does_nothing_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_release", lambda: lambda _: None)
    assert versions.self_test() is False


# ---- faults and bugs


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("NCCL error: remote process exited"), True),
        (torch.distributed.DistBackendError("x"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # a file server's
        (ValueError("gloo"), False),
    ],
)
def test_what_looks_like_a_lost_peer(error: Exception, wanted: bool) -> None:
    assert is_communication(error) is wanted
    wrapped = KeyError("x")
    wrapped.__cause__ = error
    assert is_communication(wrapped) is wanted


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.77.0.3]:40121", ("10.77.0.3",)),
        ("ncclRemoteError … [0] NCCL INFO Call to recv from 10.1.2.3<51234> failed", ("10.1.2.3",)),
        ("[10.0.0.1]:1 and [10.0.0.2]:2, again [10.0.0.1]:3", ("10.0.0.1", "10.0.0.2")),
        ("torch 2.13.0.1, pair.cc:547: time-out of 10.0.0.5", ()),
    ],
)
def test_whom_an_error_names(text: str, addresses: tuple[str, ...]) -> None:
    wrapped = KeyError("x")
    wrapped.__cause__ = RuntimeError(text)
    assert peers_named_by(wrapped) == addresses


def test_fingerprints_of_one_bug_are_equal() -> None:
    def fail(number: int) -> BaseException:
        try:
            raise ValueError(f"tensor at 0x7f{number:x} has {number}.5e-3 elements")
        except ValueError as err:
            return err

    assert fingerprint(fail(12)) == fingerprint(fail(345))
    assert fingerprint(fail(1)) != fingerprint(KeyError("tensor"))


# ---- seeds


def draw() -> tuple[object, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seeds_depend_on_seed_step_and_rank() -> None:
    drawn = {}
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]:
        seeds.seed_all(*key)
        drawn[key] = draw()
        seeds.seed_all(*key)
        assert draw() == drawn[key]
    for values in zip(*drawn.values(), strict=True):
        assert len(set(values)) == len(drawn)


def test_random_state_comes_back() -> None:
    state = seeds.state()
    first = draw()
    seeds.set_state(state)
    assert draw() == first


# ---- snapshots


class Data:
    def __init__(self, size: int = 1) -> None:
        self.position, self.table = 0, torch.zeros(size)

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position, "table": self.table}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.position, self.table = state["position"], state["table"]  # type: ignore[assignment]


def make_snapshot(**objects: object):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    objects |= {"scheduler": scheduler}
    return model, optimizer, scheduler, Snapshot(model, [optimizer], objects, keeps_random_state=True)


def test_a_step_is_undone() -> None:
    data = Data()
    model, optimizer, scheduler, snapshot = make_snapshot(data=data)
    optimizer.step()
    snapshot.take(0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    first = draw()
    model(torch.randn(4, 2))
    model(torch.randn(4, 2))
    data.position, optimizer.param_groups[0]["momentum"] = 5, 0.9
    data.table.add_(1)
    scheduler.step()
    snapshot.restore()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert data.position == 0 and float(data.table) == 0
    assert scheduler.last_epoch == 0
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.5, 0)
    assert draw() == first


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def means(model: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("running_mean")]


@pytest.mark.parametrize("wrap", [lambda module: module, DistributedDataParallel], ids=["plain", "ddp"])
def test_buffers_of_models_that_are_called_one_by_one_are_put_back(wrap: Callable, alone: None) -> None:
    """The chunks of a pipeline, generator and discriminator: nobody calls the list that holds them."""
    chunks = nn.ModuleList([wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) for _ in range(2)])
    snapshot = Snapshot(chunks, [], {}, keeps_random_state=False)
    snapshot.take(0)
    before = means(chunks)
    for chunk in (chunks[1], chunks[0], chunks[1]):
        chunk(torch.randn(4, 2))
    assert not any(map(torch.equal, means(chunks), before))
    snapshot.restore()
    assert all(map(torch.equal, means(chunks), before))


def test_buffers_in_ddp_are_not_copied_between_steps(alone: None) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    snapshot = Snapshot(model, [], {}, keeps_random_state=False)
    snapshot.take(0)
    snapshot.close()
    model(torch.randn(4, 2))
    after = means(model)
    model(torch.randn(4, 2))
    snapshot.restore()
    assert not any(map(torch.equal, means(model), after))


def test_what_was_left_behind_is_known_from_experience() -> None:
    changing, resting = Data(), Data()
    _, optimizer, scheduler, snapshot = make_snapshot(changing=changing, resting=resting)
    snapshot.take(0)
    assert snapshot.left_behind() == ["scheduler"]  # expected of a scheduler, even without experience
    for step in (1, 2):
        changing.position += 1
        optimizer.step()
        scheduler.step()
        assert snapshot.left_behind() == []
        snapshot.take(step)
    assert snapshot.left_behind() == ["changing", "scheduler"]


def test_large_state_is_not_copied_in_each_step(caplog: pytest.LogCaptureFixture) -> None:
    data = Data(1 << 20)
    _, _, _, snapshot = make_snapshot(data=data)
    assert "state['data'] holds" in caplog.text
    snapshot.take(0)
    data.position = 1
    snapshot.restore()
    assert data.position == 1
