"""One source and one target in two threads: memory, digests, and what is refused."""

from __future__ import annotations

import math
import secrets
import socket
import threading
from typing import Any

import pytest
import torch
from torch import nn

from flashrec.runtime import codec, transfer
from flashrec.runtime.errors import LayoutMismatch, RecoveryFailed
from flashrec.runtime.state import State
from flashrec.runtime.transfer import Holding
from flashrec.transport.handshake import HandshakeRefused

SECRET = secrets.token_bytes(32)


def make(width: int = 8, steps: int = 0, optimizer: Any = torch.optim.AdamW, fill: float | None = None):
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 2, bias=False))
    model.register_buffer("scalar", torch.tensor(3, dtype=torch.int64))
    model.register_buffer("empty", torch.empty(0, 4))
    model.register_buffer("channels_last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    opt = optimizer(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
    for _ in range(steps):
        model(torch.randn(4, width)).sum().backward()
        opt.step()
        scheduler.step()
    if fill is not None:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(fill)
    return model, opt, scheduler, State(model, [opt], {"scheduler": scheduler}, sends_random_state=False)


def hold(held: State | Holding, v: int = 7) -> Holding:
    return held if isinstance(held, Holding) else Holding.of(held, v, {"ddp": b"x"})


def kept(state: State, v: int = 7) -> Holding:
    """A copy of the state in host memory, one tensor after the other."""
    live = hold(state, v)
    parts = [codec.tensor_bytes(tensor.contiguous()) for tensor in live.tensors]
    memory = torch.zeros(sum(-len(part) % 8 + len(part) for part in parts), dtype=torch.uint8)
    slices, at = [], 0
    for part, spec in zip(parts, live.manifest.specs(), strict=True):
        assert len(part) == spec.num_bytes
        slices.append(memory[at : at + len(part)])
        if len(part):
            slices[-1].copy_(torch.frombuffer(part, dtype=torch.uint8))
        at += -len(part) % 8 + len(part)
    return Holding(live.manifest, slices)


def move(source: State | Holding, target: State, v: int = 7) -> dict[str, Any]:
    """Both ends; what each returned or raised."""
    found: dict[str, Any] = {}

    def run(name: str, call: Any) -> None:
        try:
            found[name] = call()
        except Exception as err:
            found[name] = err

    with transfer.listen("127.0.0.1") as listener:
        listener.settimeout(10)
        address = transfer.Address("127.0.0.1", listener.getsockname()[1])
        ends = [
            ("target", lambda: transfer.receive_state(listener, transfer.Sockets(), SECRET, target, 10.0)),
            ("source", lambda: transfer.send(address, transfer.Sockets(), SECRET, hold(source, v), 10.0)),
        ]
        threads = [threading.Thread(target=run, args=end) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    return found


@pytest.mark.parametrize("how", ["live", "kept", "own memory"])
def test_everything_arrives_in_the_memory_that_is_there(how: str) -> None:
    model, opt, scheduler, source = make(steps=5)
    other, other_opt, other_scheduler, target = make(fill=-1.0)
    places = {name: tensor.data_ptr() for name, tensor in other.state_dict(keep_vars=True).items()}
    if how == "own memory":
        moved = transfer.load(kept(source), target)
    else:
        found = move(source if how == "live" else kept(source), target)
        moved = found["target"]
        assert moved.num_bytes == found["source"].num_bytes > 0
        assert moved.digest == found["source"].digest
    assert moved.manifest.v == 7 and moved.manifest.parts == {"ddp": b"x"}
    assert moved.num_bytes == sum(spec.num_bytes for spec in moved.manifest.specs())
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert places == {name: tensor.data_ptr() for name, tensor in other.state_dict(keep_vars=True).items()}
    mine, theirs = opt.state_dict(), other_opt.state_dict()
    assert list(mine["state"]) == list(theirs["state"])
    for index, slots in mine["state"].items():
        assert list(slots) == list(theirs["state"][index])
        assert all(torch.equal(slots[key], theirs["state"][index][key]) for key in slots)
    assert mine["param_groups"] == theirs["param_groups"]
    assert scheduler.state_dict() == other_scheduler.state_dict()


@pytest.mark.parametrize("how", ["live", "kept"])
def test_small_tensors_of_every_type_arrive_bit_by_bit(how: str) -> None:
    """They travel packed, and lie elsewhere at each end."""
    types = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint16, torch.bool, torch.complex64)

    def build(seed: int) -> nn.Module:
        generator, model = torch.Generator().manual_seed(seed), nn.Module()
        for number in range(60):
            dtype, shape = types[number % len(types)], [(), (3,), (5, 4), (2, 3, 4)][number % 4]
            high = 2 if dtype is torch.bool else 256
            size = math.prod(shape) * dtype.itemsize
            data = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
            model.register_buffer(f"b{number}", data.t().contiguous().t() if seed and len(shape) == 2 else data)
        return model

    source, target = build(0), build(1)
    state = State(source, [], {}, sends_random_state=False)
    found = move(kept(state) if how == "kept" else state, State(target, [], {}, sends_random_state=False))
    assert found["target"].digest == found["source"].digest
    for one, other in zip(source.buffers(), target.buffers(), strict=True):
        assert codec.tensor_bytes(one.contiguous()) == codec.tensor_bytes(other.contiguous())


def test_a_torn_target_loses_what_the_source_does_not_have() -> None:
    _, _, _, source = make(steps=0)
    _, opt, _, target = make(steps=3)
    move(source, target)
    assert not opt.state


def test_another_model_is_refused_on_both_sides() -> None:
    found = move(make(width=8)[3], make(width=4)[3])
    assert isinstance(found["target"], LayoutMismatch)
    assert "parameter 0.weight: float32[8, 8] at the source, float32[4, 4] here" in str(found["target"])
    assert "Every rank must build the same model" in str(found["target"])
    assert isinstance(found["source"], ConnectionError) and "the target refuses" in str(found["source"])


def test_another_number_of_optimizers_is_refused() -> None:
    model, opt, _, _ = make()
    found = move(State(model, [opt, opt], {}, False), make()[3])
    assert "the source has 2 optimizers, this rank 1" in str(found["target"])


def test_bytes_that_change_on_the_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = transfer.target.receive_all

    def flip(connection: socket.socket, views: list[memoryview]) -> None:
        receive(connection, views)
        if len(views[0]) > 16:  # no digest
            views[0][3] ^= 1

    monkeypatch.setattr(transfer.target, "receive_all", flip)
    found = move(make(steps=1)[3], make()[3])
    assert isinstance(found["target"], RecoveryFailed) and "other bytes than it left" in str(found["target"])


def test_a_stranger_is_refused_and_the_source_is_still_awaited(caplog: pytest.LogCaptureFixture) -> None:
    source, target, found = make(steps=1)[3], make()[3], []
    with transfer.listen("127.0.0.1") as listener:
        listener.settimeout(10)
        address = transfer.Address("127.0.0.1", listener.getsockname()[1])
        thread = threading.Thread(
            target=lambda: found.append(transfer.receive_state(listener, transfer.Sockets(), SECRET, target, 10.0))
        )
        thread.start()
        with pytest.raises(HandshakeRefused):
            transfer.send(address, transfer.Sockets(), secrets.token_bytes(32), hold(source), 10.0)
        sent: list[int] = []
        transfer.send(address, transfer.Sockets(), SECRET, hold(source), 10.0, sent.append)
        thread.join(10)
    assert found[0].manifest.v == 7 and sent[-1] == found[0].num_bytes
    assert "restore: refused a connection from 127.0.0.1" in caplog.text


def test_a_fence_cuts_a_transfer() -> None:
    sockets, found = transfer.Sockets(), []

    def receive(listener: socket.socket) -> None:
        try:
            transfer.receive_state(listener, sockets, SECRET, make()[3], 30.0)
        except OSError as err:
            found.append(err)

    with sockets.watch(transfer.listen("127.0.0.1")) as listener:
        thread = threading.Thread(target=receive, args=(listener,))
        thread.start()
        while thread.is_alive() and not found:
            sockets.shut()
        thread.join(5)
    assert found


def test_sub_tensors_and_other_parameter_kinds_are_refused() -> None:
    class Odd(torch.Tensor):
        pass

    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.ones(2).as_subclass(Odd))
    with pytest.raises(NotImplementedError, match="buffer odd is a Odd"):
        State(model, [], {}, False)
