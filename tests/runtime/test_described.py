"""What a state remembers of its last description must never show in the next one, whatever a script does in between.

Each change below is one way in which something remembered could be wrong. What is copied after it is compared with what
a `State` says that has never described anything, and with the bytes that are there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from flashrec.runtime import codec
from flashrec.runtime.mirrors.copying import Copying
from flashrec.runtime.mirrors.slots import Pair, Slot
from flashrec.runtime.specs import TensorSpec
from flashrec.runtime.state import Described, State

pytestmark = pytest.mark.torch


class Average:
    """An object whose state holds tensors large enough to travel aside."""

    def __init__(self, *lengths: int) -> None:
        self.tensors = [torch.arange(float(length)) for length in lengths]
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors, self.count = state["tensors"], state["count"]


class Script:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(300, 300))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.average = Average(codec.ASIDE_BYTES, 1 << 20)
        self.state, self.own = self.remade(), Pair()

    def remade(self) -> State:
        return State(self.model, [self.optimizer], {"s": self.scheduler, "a": self.average}, sends_random_state=False)

    def train(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.optimizer.step()

    def copy(self, v: int) -> Slot:
        copying = Copying(self.state, v, {}, self.own.next())
        copying.finish()
        copying.slot.complete(v, b"", b"")
        assert copying.manifest == self.remade().manifest(v, {})
        return copying.slot


def entry(script: Script, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = script.optimizer.state[script.optimizer.param_groups[0]["params"][number]]
    return found


def first(script: Script) -> nn.Parameter:
    return next(script.model.parameters())


def other_storage(script: Script) -> None:
    first(script).data = torch.randn(16, 16)


def other_stride(script: Script) -> None:
    first(script).data = torch.randn(16, 16).t()


def other_place_in_a_storage(script: Script) -> None:
    with torch.no_grad():
        first(script).set_(torch.randn(500).untyped_storage(), 100, (16, 16))


def other_shape(script: Script) -> None:
    first(script).data = torch.randn(8, 16)


def other_dtype(script: Script) -> None:
    script.model.half()


def other_dtype_of_the_same_size(script: Script) -> None:
    script.model[0].register_buffer("mask", torch.ones(3, dtype=torch.int32))
    script.copy(90)
    script.model[0].mask = torch.ones(3)


def first_step_of_the_optimizer(script: Script) -> None:
    script.optimizer.state.clear()
    script.copy(90)
    script.copy(91)
    script.train()


def step(script: Script) -> None:
    script.train()
    script.scheduler.step()


def hyper_parameter(script: Script) -> None:
    script.optimizer.param_groups[0]["weight_decay"] = 0.5


def loaded(script: Script) -> None:
    script.train()
    script.optimizer.load_state_dict(Script().optimizer.state_dict())


def loaded_with_state(script: Script) -> None:
    other = Script()
    other.train()
    script.optimizer.load_state_dict(other.optimizer.state_dict())


def entry_replaced(script: Script) -> None:
    entry(script)["exp_avg"] = torch.randn(16, 16)


def entry_added(script: Script) -> None:
    entry(script)["more"] = torch.randn(5)


def entry_renamed(script: Script) -> None:
    entry(script)["renamed"] = entry(script).pop("exp_avg")


def entries_exchanged(script: Script) -> None:
    """Of two parameters that look alike."""
    params = script.optimizer.param_groups[0]["params"]
    one, other = params[0], params[4]
    assert one.shape == other.shape
    state = script.optimizer.state
    state[one], state[other] = state[other], state[one]


def entries_in_other_order(script: Script) -> None:
    state = script.optimizer.state
    one = next(iter(state))
    state[one] = state.pop(one)


def value_that_is_no_tensor(script: Script) -> None:
    entry(script)["count"] = 3
    script.copy(90)
    entry(script)["count"] = 4


def tensor_becomes_a_value(script: Script) -> None:
    entry(script)["step"] = 3.0


def group_added(script: Script) -> None:
    script.optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3))], "lr": 0.5})


def parameter_of_a_group_replaced(script: Script) -> None:
    params = script.optimizer.param_groups[0]["params"]
    new = nn.Parameter(torch.ones(1))
    script.optimizer.state[new] = script.optimizer.state.pop(params[0])
    params[0] = new


def buffer_added(script: Script) -> None:
    script.model[2].register_buffer("more", torch.randn(16))


def buffer_renamed(script: Script) -> None:
    script.model[1].register_buffer("renamed", script.model[1].running_mean)
    script.model[1].running_mean = None


def buffer_replaced(script: Script) -> None:
    script.model[1].running_mean = torch.randn(16)


def small_buffer_becomes_large(script: Script) -> None:
    script.model[1].running_mean = torch.randn(100_000)


def object_counts(script: Script) -> None:
    script.average.count += 1


def object_holds_other_tensors(script: Script) -> None:
    script.average.tensors = [torch.randn(1 << 20), torch.randn(codec.ASIDE_BYTES)]


def object_holds_more_tensors(script: Script) -> None:
    script.average.tensors.append(torch.randn(1 << 20))


def object_holds_small_tensors(script: Script) -> None:
    script.average.tensors = [torch.randn(3)]


CHANGES: list[Callable[[Script], None]] = [
    other_storage, other_stride, other_place_in_a_storage, other_shape, other_dtype, other_dtype_of_the_same_size,
    first_step_of_the_optimizer, step, hyper_parameter, loaded, loaded_with_state, entry_replaced, entry_added,
    entry_renamed, entries_exchanged, entries_in_other_order, value_that_is_no_tensor, tensor_becomes_a_value,
    group_added, parameter_of_a_group_replaced, buffer_added, buffer_renamed, buffer_replaced,
    small_buffer_becomes_large, object_counts, object_holds_other_tensors, object_holds_more_tensors,
    object_holds_small_tensors,
]  # fmt: skip


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(codec.tensor_bytes(tensor.detach().contiguous()))


def assert_is_copied(script: Script, v: int) -> None:
    slot = script.copy(v)
    live: Described = script.remade().describe(v, {})
    places = slot.begin_with(live.specs)
    assert sorted(places.early + places.later) == list(range(len(live.specs)))
    for spec, place, tensor in zip(live.specs, places.views, live.tensors, strict=True):
        assert raw(place) == raw(tensor), spec
    slot.complete(v, b"", b"")


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_nothing_remembered_shows_after_a_change(change: Callable[[Script], None]) -> None:
    script = Script()
    script.train()
    for v in range(4):  # both slots know where things go
        assert_is_copied(script, v)
    change(script)
    for v in range(100, 103):
        assert_is_copied(script, v)


def test_nothing_is_described_twice_while_nothing_changes() -> None:
    script = Script()
    script.train()
    slot, before = script.copy(0), script.state.describe(1, {})
    views = slot.begin_with(before.specs).views
    script.train()
    after = script.state.describe(2, {})
    assert all(one is other for one, other in zip(before.specs, after.specs, strict=True))
    assert slot.begin_with(after.specs).views is views


def test_what_a_forward_may_change_is_copied_before_it() -> None:
    script = Script()
    script.train()
    script.copy(0)
    specs = script.state.describe(1, {}).specs
    early = {specs[i].name for i in script.own.of(0).begin_with(specs).early}
    assert early == {*(f"buffer 1.{name}" for name, _ in script.model[1].named_buffers()), "aside 0"}
    assert "aside 1" in {spec.name for spec in specs}, "too large to be kept, so it does not change before the vote"


def test_a_tensor_that_is_spread_otherwise_is_described_anew(tmp_path: Path) -> None:
    """On one rank a shard is as large as the whole."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        script = Script()
        script.train()
        local = torch.randn(16, 16)
        for placement in (Shard(0), Shard(1), Replicate()):
            entry(script)["exp_avg"] = DTensor.from_local(local, mesh, [placement], run_check=False)
            for v in range(3):
                assert_is_copied(script, v)
    finally:
        dist.destroy_process_group()


def test_a_slot_that_was_used_for_something_else_is_laid_out_anew() -> None:
    specs, slot = [TensorSpec("parameter a", (10,), "float32", "cpu")], Slot()
    slot.begin_with(specs)
    slot.begin(1000)
    (view,) = slot.begin_with(specs).views
    view.fill_(1.0)
    assert slot.buffer.numel() < 1000 and slot.buffer[:40].view(torch.float32).eq(1.0).all()


def test_what_has_been_replaced_is_not_kept_alive() -> None:
    class Memory(bytearray):
        pass

    script, memory = Script(), Memory(16 * 16 * 4)
    script.train()
    gone = weakref.ref(memory)
    entry(script)["exp_avg"] = torch.frombuffer(memory, dtype=torch.float32).view(16, 16)
    del memory
    script.copy(0), script.copy(1)
    assert gone() is not None
    del entry(script)["exp_avg"]
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
        torch.bool, torch.complex64, torch.complex128,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("length", [0, 7, 40_000])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_every_bit_of_every_type_is_copied(dtype: torch.dtype, length: int, is_contiguous: bool) -> None:
    """Also of numbers that are none."""
    torch.manual_seed(1)
    model = nn.Module()
    random = torch.randint(0, 2 if dtype is torch.bool else 256, (2 * length * dtype.itemsize,), dtype=torch.uint8)
    held = random.view(dtype).view(length, 2)
    model.register_buffer("held", held.contiguous() if is_contiguous else held.t().contiguous().t())
    assert length == 0 or model.held.is_contiguous() is is_contiguous
    copying = Copying(State(model, [], {}, sends_random_state=False), 0, {}, slot := Slot())
    copying.finish()
    assert bytes(codec.tensor_bytes(slot.buffer))[: random.numel()] == bytes(codec.tensor_bytes(random))
