"""Uses of DDP that are refused, with the reason, and what a reducer that is made again keeps."""

from __future__ import annotations

import copy
import pickle
import struct
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from flashrec.runtime.parallel.ddp import DdpInstances
from flashrec.runtime.torch_private import ddp as private_ddp
from tests.runtime import programs
from tests.runtime.support import Cluster

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def delayed() -> DistributedDataParallel:
    model = net()
    name, param = next(iter(model.named_parameters()))
    return DistributedDataParallel(
        model, delay_all_reduce_named_params=[(name, param)], param_to_hook_all_reduce=list(model.parameters())[-1]
    )


def sparse() -> DistributedDataParallel:
    return DistributedDataParallel(nn.EmbeddingBag(4, 4, sparse=True), static_graph=True)


def optimizer_in_backward() -> DistributedDataParallel:
    model = net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return DistributedDataParallel(model)


def with_hook(state: Any, hook: Callable[..., Any]) -> DistributedDataParallel:
    ddp = DistributedDataParallel(net())
    ddp.register_comm_hook(state, hook)
    return ddp


def power_sgd() -> DistributedDataParallel:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    return with_hook(state, powerSGD_hook.powerSGD_hook)


class Counting:
    """State of a hook that can be kept and sent."""

    def __init__(self, num_elements: int = 1) -> None:
        self.value = torch.zeros(num_elements)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def hook(state, bucket):
    raise AssertionError


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (delayed, "torch does not wait for their all-reduce"),
        (sparse, "leave either off"),
        (optimizer_in_backward, "call optimizer.step\\(\\) after the backward"),
        (power_sgd, "the error that each rank feeds back is lost with the rank"),
        (lambda: with_hook([0], hook), "is a list, which cannot be recovered"),
        (lambda: with_hook(Counting(1 << 19), hook), "holds 2097152 bytes"),
    ],
)
def test_what_cannot_be_recovered_is_refused_with_the_reason(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        DdpInstances(make())


def test_mixed_precision_is_refused() -> None:
    ddp = DistributedDataParallel(net())
    ddp.mixed_precision = object()  # torch itself cannot build one without an accelerator
    with pytest.raises(NotImplementedError, match="use autocast"):
        DdpInstances(ddp)


def test_states_of_hooks_are_found() -> None:
    state = Counting()
    assert DdpInstances(with_hook(state, hook)).hook_states() == {"ddp 0 hook 0": state}
    assert DdpInstances(with_hook(None, default_hooks.fp16_compress_hook)).hook_states() == {}
    assert DdpInstances(with_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)).hook_states() == {}


def test_a_hook_that_comes_late_is_refused() -> None:
    ddp = DistributedDataParallel(net())
    found = DdpInstances(ddp)
    found.open(0)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(RuntimeError, match=r"before flashrec\.Session"):
        found.open(1)


def test_a_graph_that_becomes_static_late_is_refused() -> None:
    ddp = DistributedDataParallel(net())
    found = DdpInstances(ddp)
    ddp._set_static_graph()
    with pytest.raises(RuntimeError, match="when DDP is created"):
        found.open(0)


def test_uneven_inputs_are_refused() -> None:
    ddp = DistributedDataParallel(net())
    found = DdpInstances(ddp)
    with Join([ddp]), pytest.raises(RuntimeError, match="a rank without data does not vote"):
        found.open(0)


def test_a_step_cut_inside_of_no_sync_begins_again_with_buffers_shared() -> None:
    """Else this rank would leave out the broadcast that the others wait in."""
    ddp, other = DistributedDataParallel(net()), DistributedDataParallel(net())
    found, target = DdpInstances(ddp), DdpInstances(other)
    found.open(0)
    with ddp.no_sync():
        ddp(torch.randn(8, 4))
    assert not ddp.require_forward_param_sync
    found.settle_for(0)
    assert ddp.require_forward_param_sync
    ddp.require_forward_param_sync = False  # an evaluation between steps does this
    target.impose(found.describe())
    assert not other.require_forward_param_sync


@pytest.mark.parametrize("builtin", [dist.BuiltinCommHookType.FP16_COMPRESS, None])
def test_a_reducer_that_is_made_again_has_the_hooks_of_the_former(builtin: Any) -> None:
    calls = []

    def count(state, bucket):
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    ddp = DistributedDataParallel(net(), find_unused_parameters=True)
    if builtin:
        ddp._register_builtin_comm_hook(builtin)
    else:
        ddp.register_comm_hook(None, count)
    found, x = DdpInstances(ddp), torch.randn(8, 4)
    ddp(x).sum().backward()
    wanted, num_calls = [param.grad.clone() for param in ddp.parameters()], len(calls)
    found.open(0)
    former = ddp.reducer
    found.settle_for(0)
    assert ddp.reducer is not former
    ddp.zero_grad()
    ddp(x).sum().backward()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(ddp.parameters(), wanted, strict=True))
    assert len(calls) == 2 * num_calls
    exact = DistributedDataParallel(net())
    exact.load_state_dict(ddp.state_dict())
    exact(x).sum().backward()
    pairs = zip(ddp.parameters(), exact.parameters(), strict=True)
    is_compressed = not all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert is_compressed == bool(builtin)


def test_all_buffers_of_rank_0_are_shared_bit_by_bit_at_once(make_cluster: Callable[[int], Cluster]) -> None:
    cluster = make_cluster(2)
    cluster.start_all(programs.share_buffers)
    cluster.await_end()
    results = cluster.results()
    assert results[0] == results[1]
    mean = [byte for value in (-0.0, float("nan"), 3.0) for byte in struct.pack("=f", value)]
    assert results[0]["bytes"][:3] == [mean, list(struct.pack("=q", 9)), [0, 1, 1]]
    assert results[0]["versions"] is True
    assert results[0]["issued"] == 1


class Wire:
    """In place of the tree: on rank 0 it takes what goes down, elsewhere it fills what is expected."""

    def __init__(self, sent: bytes | None = None) -> None:
        self.sent, self.num_views = sent, 0

    def __call__(self, views: list[memoryview]) -> None:
        self.num_views = len(views)
        if self.sent is None:
            self.sent = b"".join(views)
            return
        rest = self.sent
        for view in views:
            view[:], rest = rest[: len(view)], rest[len(view) :]
        assert not rest


def buffered(fill: float, num: int = 3, strided: bool = False) -> DistributedDataParallel:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2))
    for i in range(num):
        module.register_buffer(f"b{i}", torch.full((i % 5, 3), fill + i, dtype=(torch.float32, torch.float64)[i % 2]))
    if strided:
        module.b1 = torch.full((3, 1), fill, dtype=torch.float64).t()
        module.b2 = torch.full((3, 2), fill).t()
    return DistributedDataParallel(module, init_sync=False)


@pytest.mark.parametrize("num", [3, 300])
@pytest.mark.parametrize("is_strided", [(False, False), (True, False), (False, True)])
def test_buffers_go_over_the_tree_with_or_without_a_copy(num: int, is_strided: tuple[bool, bool]) -> None:
    """A rank may need a copy where another one does not."""
    source, target = buffered(1.5, num, is_strided[0]), buffered(7.0, num, is_strided[1])
    there = private_ddp.SharedBuffers(source, (sent := Wire()))
    here = private_ddp.SharedBuffers(target, (got := Wire(b"")))
    here._is_source = False
    versions = [buffer._version for buffer in target.buffers()]
    for add in range(3):
        for buffer in source.buffers():
            buffer.add_(add)
        sent.sent = None
        there.share()
        got.sent = sent.sent
        here.share()
        assert all(map(torch.equal, source.buffers(), target.buffers()))
        assert [buffer._version for buffer in target.buffers()] == versions
    assert (sent.num_views == 1) == (num == 300 or is_strided[0])
    assert (got.num_views == 1) == (num == 300 or is_strided[1])


def move(ddp: DistributedDataParallel) -> None:
    ddp.module.b1.data = torch.full((1, 3), 9.0, dtype=torch.float64)


def shrink(ddp: DistributedDataParallel) -> None:
    ddp.module.b1.resize_(1, 2)


def grow(ddp: DistributedDataParallel) -> None:
    ddp.module.b1.resize_(100, 100)
    ddp.module.b1.fill_(4.0)


@pytest.mark.parametrize("change", [move, shrink, grow])
def test_memory_that_the_script_has_changed_in_place_is_found(
    change: Callable[[DistributedDataParallel], None],
) -> None:
    """Where it was may belong to something else by now."""
    ddp = buffered(1.0)
    buffers = private_ddp.SharedBuffers(ddp, (wire := Wire()))
    buffers.share()
    before = wire.sent
    change(ddp)
    wire.sent = None
    buffers.share()
    assert wire.sent is not None and wire.sent != before
    of_b1 = ddp.module.b1.numpy().tobytes()
    assert of_b1 in wire.sent and ddp.module.b2.numpy().tobytes() in wire.sent


def test_another_kind_of_tensor_at_the_same_place_is_left_to_ddp() -> None:
    class Odd(torch.Tensor):
        pass

    ddp = buffered(1.0)
    buffers = private_ddp.SharedBuffers(ddp, (wire := Wire()))
    buffers.share()
    ddp.module.b1 = ddp.module.b1.as_subclass(Odd)
    wire.sent = None
    buffers.share()
    assert wire.sent is None


class Forwards:
    """A DDP whose forwards share buffers over a `Wire` while `is_training`. own: how often DDP has broadcast itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has_wire: bool = True) -> None:
        self.ddp, self.wire, self.own, self.is_training = DistributedDataParallel(net()), Wire(), 0, True
        self.buffers: Any = private_ddp.SharedBuffers(self.ddp, self.wire if has_wire else None)
        self.buffers.share_in_forward(lambda: self.is_training)
        monkeypatch.setattr(DistributedDataParallel, "_sync_buffers", lambda ddp: self._count())

    def _count(self) -> None:
        self.own += 1

    def run(self, ddp: Any = None) -> tuple[int, bool]:
        """(how often DDP itself has broadcast in this forward, were the buffers on the wire)"""
        self.own, self.wire.sent = 0, None
        (ddp or self.ddp)(torch.ones(2, 4))
        return self.own, self.wire.sent is not None


def test_a_forward_takes_the_buffers_of_rank_0_this_way_while_this_rank_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Forwards(monkeypatch)
    mean = forwards.ddp.module[1].running_mean
    before = bytes(mean.numpy())
    assert forwards.run() == (0, True)
    assert before in (forwards.wire.sent or b"") and bytes(mean.numpy()) != before  # before the module changes them
    forwards.is_training = False
    assert forwards.run() == (1, False)
    forwards.is_training = True
    del forwards.buffers  # the session is gone
    assert forwards.run() == (1, False)


def test_a_forward_that_needs_no_buffers_sends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Forwards(monkeypatch)
    with forwards.ddp.no_sync():
        assert [forwards.run(), forwards.run()] == [(0, True), (0, False)]  # as DDP does: with the first one
    assert [forwards.run(), forwards.run()] == [(0, False), (0, True)]
    with torch.no_grad():
        assert [forwards.run(), forwards.run()] == [(0, True), (0, False)]


def test_a_script_that_says_itself_how_buffers_become_equal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Forwards(monkeypatch)
    forwards.ddp._register_buffer_comm_hook(None, lambda state, buffers: None)
    assert not forwards.run()[1]
    assert private_ddp.rebuild(forwards.ddp) == (False, False)


def test_without_a_tree_ddp_broadcasts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Forwards(monkeypatch, has_wire=False).run() == (1, False)


@pytest.mark.parametrize("place", ["before", "inside"])
def test_a_forward_that_fails_does_not_keep_ddp_from_sharing_the_next_time(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Else this rank would issue other collectives than the others from then on."""
    forwards = Forwards(monkeypatch)

    def fail(*_: Any) -> None:
        raise ValueError(place)

    with monkeypatch.context() as broken:
        if place == "before":
            broken.setattr(DistributedDataParallel, "_pre_forward", fail)
        else:
            broken.setattr(nn.Linear, "forward", fail)
        with pytest.raises(ValueError, match=place):
            forwards.run()
    assert forwards.run() == (0, True)
    assert forwards.run() == (0, True)


def test_a_copy_of_a_ddp_shares_its_own_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Forwards(monkeypatch)
    copied = copy.deepcopy(forwards.ddp)
    assert forwards.run(copied) == (1, False)
    assert forwards.run(pickle.loads(pickle.dumps(forwards.ddp))) == (1, False)
    assert forwards.run() == (0, True)


@pytest.mark.parametrize("why", ["has_delayed_params", "is_compiled_reducer"])
def test_a_ddp_that_does_not_share_in_its_forward_is_left_alone(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(private_ddp, why, lambda ddp: True)
    assert Forwards(monkeypatch).run() == (1, False)


def test_what_rank_0_alone_has_changed_between_steps_comes_with_the_next_forward(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    try:
        cluster.start_all(programs.change_buffers)
        cluster.await_end()
        found = cluster.results()
    finally:
        cluster.close()
    assert found[0]["means"] == found[1]["means"] and found[0]["means"][2] == [5.0, 5.0]
    assert found[0]["issued"] == found[1]["issued"] == [2, 0, 0, 0, 2]  # before and after training DDP does it itself


def test_a_script_may_take_all_buffers_away() -> None:
    ddp = DistributedDataParallel(net())
    buffers = private_ddp.SharedBuffers(ddp)
    assert private_ddp.rebuild(ddp)[1]
    ddp.module[1] = nn.Identity()
    buffers.share()
    assert not private_ddp.rebuild(ddp)[1]


@pytest.mark.parametrize("how", ["buffer", "module", "around", "one more", "one less"])
def test_what_the_script_puts_in_place_of_buffers_is_found(how: str) -> None:
    """Without looking through all modules again in each step."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4))))
    shared: list[list[float]] = []
    buffers = private_ddp.SharedBuffers(ddp, lambda views: shared.append(list(views[0].cast("f")[:4])))
    buffers.share()
    buffers.share()
    assert len(shared) == 2
    inner = ddp.module[1]
    if how == "buffer":
        inner[0].running_mean = torch.full((4,), 7.0)
    elif how == "module":
        inner[0] = nn.BatchNorm1d(4)
        inner[0].running_mean.fill_(7.0)
    elif how == "around":
        ddp.module[1] = nn.Sequential(nn.BatchNorm1d(4))
        ddp.module[1][0].running_mean.fill_(7.0)
    elif how == "one more":
        inner[0].running_mean.fill_(7.0)
        inner[0].register_buffer("more", torch.ones(2))
        ddp._assign_modules_buffers()  # as in its next forward
    else:
        inner[0].running_mean.fill_(7.0)
        del inner[0]._buffers["num_batches_tracked"]
    buffers.share()
    assert shared[-1] == [7.0] * 4
    assert len(buffers._views) == {"one more": 4, "one less": 2}.get(how, 3)
    untouched = ddp.modules_buffers
    buffers.share()
    assert ddp.modules_buffers is untouched
