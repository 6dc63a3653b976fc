"""Several sources of one target: who sends what, and replicas that are none."""

from __future__ import annotations

import functools
import math
import re
import secrets
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flashrec.runtime import transfer
from flashrec.runtime.errors import LayoutMismatch, RecoveryFailed
from flashrec.runtime.specs import TensorSpec
from flashrec.runtime.state import State
from flashrec.runtime.transfer import Holding
from flashrec.runtime.transfer.memory import Memory
from flashrec.runtime.transfer.pieces import Piece, cut
from flashrec.runtime.transfer.requests import CHECK_EVERY, Requests

SECRET = secrets.token_bytes(32)
LIMIT = 1024  # bytes of a piece, so that a small model has many


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for end in (transfer.source, transfer.target):
        monkeypatch.setattr(end, "cut", functools.partial(cut, limit=LIMIT))
    monkeypatch.setattr(transfer.source, "num_streams", lambda num_pieces, num_sources: 3)


def make(steps: int = 2, seen: float = 0.0) -> State:
    """seen: another mean of the running statistics, as on another rank."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Linear(48, 3))
    model.register_buffer("view", torch.arange(4000.0).view(40, 100).t())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 48)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        model[1].running_mean += seen
    return State(model, [optimizer], {}, sends_random_state=False)


def move(target: State, sources: dict[int, Holding]) -> dict[str, Any]:
    """By rank what each source returned or raised, and "target"."""
    found: dict[Any, Any] = {}

    def run(name: Any, call: Any) -> None:
        try:
            found[name] = call()
        except Exception as err:
            found[name] = err

    with transfer.listen("127.0.0.1") as listener:
        listener.settimeout(20)
        address = transfer.Address("127.0.0.1", listener.getsockname()[1])
        order = tuple(sources)
        calls: dict[Any, Any] = {
            rank: functools.partial(
                transfer.send, address, transfer.Sockets(), SECRET, holding, 20.0, source=rank, num_sources=len(order)
            )
            for rank, holding in sources.items()
        }
        calls["target"] = functools.partial(
            transfer.receive_state, listener, transfer.Sockets(), SECRET, target, 20.0, sources=order
        )
        threads = [threading.Thread(target=run, args=each) for each in calls.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
    return found


def content(state: State) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state.tensors()]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) and all(map(torch.equal, one, other))


def test_each_source_sends_a_part_and_all_of_it_arrives() -> None:
    states = {5: make(), 2: make(), 8: make()}
    target = make(steps=0, seen=3.0)
    found = move(target, {rank: Holding.of(state, 7, {}) for rank, state in states.items()})
    assert_equal(content(target), content(states[5]))
    moved = found.pop("target")
    assert sum(source.num_bytes for source in found.values()) == moved.num_bytes
    assert {source.digest for source in found.values()} == {moved.digest}


def test_what_replicas_may_differ_in_comes_from_the_first_one() -> None:
    first, further, target = make(seen=1.0), make(seen=2.0), make(steps=0)
    found = move(target, {1: Holding.of(first, 7, {}), 0: Holding.of(further, 7, {})})
    assert found["target"].manifest.v == 7
    assert_equal(content(target), content(first))


def test_replicas_that_differ_are_refused() -> None:
    first, further = make(), make()
    for tensor in further.tensors():
        if tensor.is_floating_point():
            tensor.add_(1e-3)
    found = move(make(steps=0), {4: Holding.of(first, 7, {}), 6: Holding.of(further, 7, {})})
    assert isinstance(found["target"], RecoveryFailed)
    # of the first tensor that both have sent, which is decided by who is faster
    told = r"rank (4 and rank 6|6 and rank 4) hold the same shard, but other bytes in (optimizer 0 )?parameter "
    assert re.match(told, str(found["target"])), found["target"]
    assert isinstance(found[4], OSError) and isinstance(found[6], OSError), "nobody believes that it has been taken"


def test_sources_at_different_steps_are_refused() -> None:
    found = move(make(steps=0), {0: Holding.of(make(), 7, {}), 1: Holding.of(make(), 8, {})})
    assert isinstance(found["target"], LayoutMismatch)
    assert "rank 0 and rank 1 are to send parts of one state, but hold step 7 and step 8" in str(found["target"])


def test_sources_with_other_tensors_are_refused() -> None:
    found = move(make(steps=0), {0: Holding.of(make(), 7, {}), 1: Holding.of(make(steps=0), 7, {})})
    assert isinstance(found["target"], LayoutMismatch) and "hold other tensors" in str(found["target"])


def test_somebody_who_is_no_source_is_refused() -> None:
    found: list[Exception] = []

    def receive() -> None:
        with pytest.raises(RecoveryFailed, match=r"rank 3 sends a state, but it is not one of \[1\]") as caught:
            transfer.receive_state(listener, transfer.Sockets(), SECRET, make(), 20.0, sources=(1,))
        found.append(caught.value)

    with transfer.listen("127.0.0.1") as listener:
        listener.settimeout(20)
        address = transfer.Address("127.0.0.1", listener.getsockname()[1])
        thread = threading.Thread(target=receive)
        thread.start()
        with pytest.raises(OSError):
            transfer.send(address, transfer.Sockets(), SECRET, Holding.of(make(), 7, {}), 20.0, source=3)
        thread.join(20)
    assert found


def test_a_source_that_fails_ends_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    send_piece, lock, sent = transfer.source.send_piece, threading.Lock(), [0]

    def fail(connection: Any, views: Any) -> None:
        with lock:
            sent[0] += 1
            if sent[0] == 5:
                raise ConnectionResetError("cut in the test")
        send_piece(connection, views)

    monkeypatch.setattr(transfer.source, "send_piece", fail)
    found = move(make(steps=0), {0: Holding.of(make(), 7, {}), 1: Holding.of(make(), 7, {})})
    assert all(isinstance(each, OSError) for each in found.values()), found
    assert any("cut in the test" in str(each) for each in found.values())


def test_a_transfer_that_is_no_longer_wanted_does_not_begin() -> None:
    def check() -> None:
        raise RuntimeError("superseded")

    with transfer.listen("127.0.0.1") as listener:
        address = transfer.Address("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(RuntimeError, match="superseded"):
            transfer.send(address, transfer.Sockets(), SECRET, Holding.of(make(), 7, {}), 20.0, check=check)


def test_every_source_that_sends_is_compared_with_another_one() -> None:
    pieces = [Piece(number, (), is_shared=True) for number in range(3 * CHECK_EVERY)]
    requests = Requests(pieces, (0, 1, 2), [])
    sent: dict[int, list[int]] = {0: [], 1: []}
    for turn in range(len(pieces)):
        request = requests.take(turn % 2, wait=False)
        while request is not None and request.check:
            assert requests.compared(request.piece, turn % 2, bytes(16)) == ""
            request = requests.take(turn % 2, wait=False)
        if request is not None:
            sent[turn % 2].append(request.piece.number)
            requests.arrived(request.piece, turn % 2, bytes(16))
    checked = []
    while (request := requests.take(2, wait=False)) is not None:
        assert request.check
        checked.append(request.piece.number)
        requests.compared(request.piece, 2, bytes(16))
    assert checked == sent[1][::CHECK_EVERY]
    assert requests.take(2, wait=True) is None, "all is there and compared"


SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(["float32", "int64", "bool", "complex128"])), max_size=12))
def test_pieces_are_bounded_and_cover_every_byte_once(wanted: list[tuple[tuple[int, ...], str]]) -> None:
    specs = [
        TensorSpec(f"{'parameter' if i % 2 else 'buffer'} {i}", shape, dtype, "cpu")
        for i, (shape, dtype) in enumerate(wanted)
    ]
    pieces = cut(specs, limit=256)
    assert [piece.number for piece in pieces] == list(range(len(pieces)))
    at = dict.fromkeys(range(len(specs)), 0)
    for piece in pieces:
        assert 0 < piece.num_bytes <= 256
        assert piece.num_bytes == sum(block.num_bytes for block in piece.blocks)
        assert not piece.packed_dtype or {specs[block.tensor].dtype for block in piece.blocks} == {piece.packed_dtype}
        for block in piece.blocks:
            assert block.offset == at[block.tensor]
            at[block.tensor] += block.num_bytes
            assert piece.is_shared is specs[block.tensor].is_replicated
    assert at == {number: spec.num_bytes for number, spec in enumerate(specs)}


@given(SHAPES, st.randoms(use_true_random=False), st.sampled_from([torch.float32, torch.int8, torch.complex128]))
def test_a_tensor_that_lies_otherwise_in_memory_travels_in_row_major_order(
    shape: tuple[int, ...], random: Any, dtype: torch.dtype
) -> None:
    dims = list(range(len(shape)))
    random.shuffle(dims)
    plain = (torch.arange(math.prod(shape)) % 100).to(dtype).view(shape)
    back = sorted(range(len(dims)), key=dims.__getitem__)
    other = plain.permute(dims).contiguous().permute(back) if shape else plain
    assert torch.equal(plain, other)
    spec = TensorSpec("buffer x", shape, str(dtype).removeprefix("torch."), "cpu")
    stage = Memory([other], [spec]).stage()
    pieces = cut([spec], limit=64)
    sent = b"".join(bytes(view) for piece in pieces for view in stage.gather(piece))
    assert sent == bytes(plain.contiguous().numpy().tobytes())
    arrived = torch.zeros_like(other)
    stage = Memory([arrived], [spec]).stage()
    at = 0
    for piece in pieces:
        for view in stage.views(piece):
            view[:] = sent[at : at + len(view)]
            at += len(view)
        stage.scatter()
    assert torch.equal(arrived, plain)


def test_memory_that_is_not_what_the_manifest_says_is_refused() -> None:
    holding = Holding.of(make(), 7, {})
    with pytest.raises(ValueError, match="not those of the manifest"):
        Memory(holding.tensors[1:], holding.manifest.specs())
