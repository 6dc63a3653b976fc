"""FSDP2, HSDP and tensor parallel: what a cut step leaves behind is put back, shards come from the replica that has
them, and a loss that nobody can make good is refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _random as random

from flashrec.core import events
from flashrec.runtime import shards
from flashrec.runtime.errors import LayoutMismatch, UnsupportedTorch
from flashrec.runtime.parallel import fsdp
from flashrec.runtime.parallel.fsdp import FsdpModules, is_used
from flashrec.runtime.seed import seed_all
from flashrec.runtime.session import PassThrough
from flashrec.runtime.state import Manifest, State
from flashrec.runtime.torch_private import fsdp as private
from flashrec.runtime.torch_private import versions
from flashrec.runtime.torch_private.dtensor import make_random_tracker
from tests.runtime import alone
from tests.runtime.layouts import program, sharded
from tests.runtime.layouts.layout import Setup
from tests.runtime.layouts.model import WIDTH
from tests.runtime.layouts.test_layouts import Results, assert_same, undisturbed
from tests.runtime.support import TIMEOUT_S, Cluster

__all__ = ["undisturbed"]
pytestmark = pytest.mark.torch


# ---- in a process without peers


class Cut(Exception):
    pass


def half_done(setup: Setup) -> None:
    """One micro-batch without communication, then one that is cut in the middle of its backward."""
    model: Any = setup.model
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    model.set_requires_gradient_sync(True)
    cutting = [True]

    def cut(_: Any) -> None:
        if cutting.pop():
            raise Cut

    setup.watched.register_post_accumulate_grad_hook(cut)
    with pytest.raises(Cut):
        model(x).sum().backward()
    model.blocks[2].unshard(async_op=True)  # ahead of its use, as prefetching does


class LostWork(torch.distributed.distributed_c10d.Work):
    """A collective that was cut."""

    def wait(self, *_: Any) -> bool:
        raise RuntimeError("gloo: closed by peer (test)")


def leftovers(model: nn.Module) -> dict[str, int]:
    """What a cut step leaves in FSDP's parameters and groups."""
    groups = [group for _, state in private.states(model) for group in state._fsdp_param_groups]
    params = [param for group in groups for param in group.fsdp_params]
    return {
        "gathered": sum(not isinstance(param, DTensor) for param in model.parameters()),
        "sums": sum(param.unsharded_accumulated_grad is not None for param in params),
        "gradients": sum(getattr(param, "_unsharded_param", param.sharded_param).grad is not None for param in params),
        "partial sums": sum(group._partial_reduce_output is not None for group in groups),
        "gathers": sum(group._all_gather_result is not None for group in groups),
        "busy": sum(state._training_state.name != "IDLE" for _, state in private.states(model)),
    }


def settle_after_a_cut() -> tuple[dict[str, int], ...]:
    setup = sharded.hsdp_accumulate()
    part = FsdpModules(setup.model)
    half_done(setup)
    pending = private.states(setup.model)[-1][1]._fsdp_param_groups[0]
    assert pending._all_gather_result is not None
    pending._all_gather_result = pending._all_gather_result._replace(all_gather_work=LostWork())
    before = leftovers(setup.model)
    part.settle_for(0)
    after = leftovers(setup.model)
    with torch.no_grad():
        setup.model(torch.ones(2, WIDTH))
    part.settle_for(0)
    return before, after, leftovers(setup.model)


def test_what_a_cut_step_leaves_behind_is_dropped() -> None:
    before, after, again = alone.run(0, 4, settle_after_a_cut)
    assert {name for name, count in before.items() if count} >= {"gathered", "sums", "gradients", "gathers", "busy"}
    assert set(after.values()) == {0} == set(again.values()), (after, again)


def gather_first(how: str) -> tuple[int, int]:
    model: Any = sharded.hsdp().model
    if how == "unshard":
        model.blocks[1].unshard()
    else:
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
    before = leftovers(model)["gathered"]
    FsdpModules(model)
    return before, leftovers(model)["gathered"]


@pytest.mark.parametrize("how", ["evaluate", "unshard"])
def test_what_was_gathered_before_the_session_is_sharded(how: str) -> None:
    before, after = alone.run(1, 4, gather_first, how)
    assert before > 0 and after == 0


def switch_flags() -> None:
    model: Any = sharded.hsdp().model
    other: Any = sharded.hsdp().model
    part, target = FsdpModules(model), FsdpModules(other)
    begun = part.state_dict()
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    model.blocks[1].set_reshard_after_backward(False)
    switched = part.state_dict()
    assert switched != begun
    target.impose(part.describe())
    assert target.state_dict() == switched
    part.load_state_dict(begun)
    assert part.state_dict() == begun
    with pytest.raises(LayoutMismatch, match=r"module 'blocks\.0', this rank for ''"):
        target.impose([*part.describe()[1:], part.describe()[0]])
    with pytest.raises(LayoutMismatch, match="for 3 modules, this rank for 4"):
        target.impose(part.describe()[:3])


def test_flags_go_back_and_are_taken_over() -> None:
    alone.run(0, 4, switch_flags)


def take_over() -> None:
    source, target = sharded.hsdp(), sharded.hsdp()
    source.run(0)
    source.optimizers[0].step()
    FsdpModules(source.model).settle_for(1)
    states = [State(setup.model, setup.optimizers, {}, sends_random_state=False) for setup in (source, target)]
    model: Any = source.model
    model.unshard()  # the state is what the optimizer sees, whatever the modules compute with
    manifest = states[0].manifest(1, {})
    manifest = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    addresses = [shards.local(param).data_ptr() for param in target.model.parameters()]
    states[1].prepare(manifest)
    for mine, theirs in zip(states[1].tensors(), states[0].tensors(), strict=True):
        mine.copy_(theirs)
    assert [shards.local(param).data_ptr() for param in target.model.parameters()] == addresses
    model.reshard()
    assert program.digest(target) == program.digest(source)
    for param, slots in target.optimizers[0].state.items():
        assert shards.sharding_of(slots["exp_avg"]) == shards.sharding_of(param) is not None
        assert not isinstance(slots["step"], DTensor)

    spec = manifest.model[0]
    other = msgspec.structs.replace(spec.sharding, dims=(spec.sharding.dims[0], (*spec.sharding.dims[1][:3], 1)))
    wrong = (msgspec.structs.replace(spec, sharding=other), *manifest.model[1:])
    with pytest.raises(LayoutMismatch, match=r"part 1\) at the source, float32\[12, 24\] of .* part 0\) here"):
        states[1].prepare(msgspec.structs.replace(manifest, model=wrong))


def test_a_target_takes_over_the_same_part_in_its_own_memory() -> None:
    alone.run(2, 4, take_over)


def build_slots() -> None:
    """Slots that are spread otherwise than their parameter: row sums of a matrix, for example."""
    param = next(sharded.hsdp().model.parameters())
    rows = param.new_zeros(24, 1)
    built = shards.empty(param, shards.sharding_of(rows), tuple(rows.to_local().shape), rows.dtype, rows.device)
    assert built is not None and shards.sharding_of(built) == shards.sharding_of(rows) != shards.sharding_of(param)
    assert built.dtype == rows.dtype and built.to_local().shape == rows.to_local().shape
    other = msgspec.structs.replace(shards.sharding_of(rows), dims=(("tp", 8, "Shard(dim=0)", 3),))
    assert shards.empty(param, other, (3, 1), rows.dtype, rows.device) is None


def test_slots_that_are_spread_in_another_way_are_built() -> None:
    alone.run(0, 4, build_slots)


def lack(name: str) -> None:
    model = sharded.hsdp().model
    real = versions._has
    versions._has = lambda owner, wanted: wanted != name and real(owner, wanted)
    with pytest.raises(UnsupportedTorch, match=name):
        FsdpModules(model)


def test_what_fsdp_lacks_is_named() -> None:
    alone.run(0, 4, lack, "unsharded_accumulated_grad")


def make_tracker() -> None:
    """As if this machine had GPUs: torch looks at the device type of the mesh, and so does what makes the tracker."""
    made: list[Any] = []
    model = sharded.hsdp().model
    make_random_tracker(model)
    assert random._rng_tracker is None
    for param in model.parameters():
        param.device_mesh._device_type = "cuda"
    random.is_rng_supported_mesh = lambda mesh: mesh.device_type == "cuda"
    random.OffsetBasedRNGTracker = lambda mesh, run_state_sync=True: made.append(run_state_sync) or "tracker"
    for _ in range(2):
        make_random_tracker(model)
    assert made == [False] and random._rng_tracker == "tracker"


def test_random_operations_on_shards_begin_without_a_broadcast() -> None:
    alone.run(0, 4, make_tracker)


def normalise() -> list[str]:
    said: list[str] = []
    fsdp.logger.warning = lambda text, *args: said.append(text % args)
    for norm in (nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), nn.SyncBatchNorm(4), nn.LayerNorm(4)):
        FsdpModules(fully_shard(nn.Sequential(nn.Linear(4, 4), norm)))
    return said


def test_statistics_that_nobody_makes_equal_are_named() -> None:
    (said,) = alone.run(0, 2, normalise)
    assert said.startswith("running statistics of 1 (1 modules) are not the same on all ranks")


def wrap_in_fsdp1() -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="use fully_shard"):
        is_used(model)


def test_the_first_fsdp_is_refused() -> None:
    alone.run(0, 2, wrap_in_fsdp1)


def test_without_recovery_the_same_numbers_are_drawn() -> None:
    PassThrough(7, seed_rank=3).enter(5)
    drawn = torch.rand(())
    seed_all(7, 5, 3)
    assert torch.rand(()) == drawn


# ---- with peers


def await_fault(cluster: Cluster, rank: int, text: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while text not in cluster.log(rank):
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.01)


def lose(cluster: Cluster, faults: list[tuple[int, int, int, str]], **config: Any) -> None:
    """Each of `faults` (rank, life, step, place) in turn, and see that it fired. Others may be in the step
    after that of a fault before they know of it: the next one comes later."""
    config |= {"faults": faults}
    cluster.start_all(program.train, **config)
    for rank, _, step, place in faults:
        if place.startswith("stop-"):
            await_fault(cluster, rank, f"at {step} {place.removeprefix('stop-')}")
            cluster.fence()
            for other in set(range(cluster.world_size)) - {rank}:
                cluster.await_message(events.WorkerReported, rank=other, generation=cluster.generation)
            os.kill(cluster.processes[rank].pid, signal.SIGKILL)
        assert cluster.await_exit(rank) == -signal.SIGKILL, cluster.logs()
        assert f"at {step} {place.removeprefix('stop-')}" in cluster.log(rank)
        cluster.replace(rank, program=program.train, **config)
    cluster.await_end()


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        (
            "hsdp_accumulate",
            [
                (1, 1, 0, "between"),
                (3, 1, 2, "forward"),
                (2, 1, 3, "backward"),
                (0, 1, 4, "before-vote"),
                (1, 2, 5, "in-optimizer"),
            ],
        ),
        ("tp", [(3, 1, 1, "stop-backward"), (2, 1, 2, "after-optimizer"), (1, 1, 4, "in-optimizer")]),
    ],
)
def test_one_rank_after_the_other_is_replaced_bit_by_bit(
    layout: str,
    faults: list[tuple[int, int, int, str]],
    make_cluster: Callable[..., Cluster],
    undisturbed: Callable[[str], Results],
) -> None:
    cluster = make_cluster(4)
    lose(cluster, faults, layout=layout)
    assert_same(cluster.results(), undisturbed(layout))
    assert [sorted(plan.sources.items()) for plan in cluster.plans] == [[(rank, (rank + 2) % 4)] for rank, *_ in faults]
    assert [mark["protected"] for mark in cluster.marks("protection")] == ["4"]


def test_a_pair_of_tensor_parallel_ranks_draws_the_same(undisturbed: Callable[[str], Results]) -> None:
    results = undisturbed("tp")
    drawn = {rank: [numbers for _, numbers in result["losses"].values()] for rank, result in results.items()}
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_a_shard_that_exists_once_is_not_guessed(make_cluster: Callable[..., Cluster]) -> None:
    """Said at the start, and refused with the ranks when it happens."""
    cluster = make_cluster(2)
    config = {"layout": "fsdp2", "faults": [(1, 1, 2, "backward")]}
    cluster.start_all(program.train, **config)
    assert cluster.await_exit(1) == -signal.SIGKILL, cluster.logs()
    cluster.replace(1, program=program.train, **config)
    cluster.await_message(events.WorkerReported, rank=1, incarnation=2)
    cluster.await_message(events.WorkerReported, rank=0)
    assert [refusal.ranks for refusal in cluster.refusals] == [(1,)]
    assert "no replica of the shard of rank 1 is left at step 2" in cluster.refusals[0].reason
    assert "not protected: rank 0-1, because parameter first.weight exists once" in cluster.log(0)


def test_a_planned_swap_needs_no_replica(
    make_cluster: Callable[..., Cluster], undisturbed: Callable[[str], Results]
) -> None:
    """The rank that leaves sends its shard itself."""
    cluster = make_cluster(2)
    config = {"layout": "fsdp2", "faults": [(0, 1, 2, "stop-forward")]}
    cluster.start_all(program.train, **config)
    await_fault(cluster, 0, "at 2 forward")
    cluster.start_successor(1, program.train, **config)
    cluster.pause()
    os.kill(cluster.processes[0].pid, signal.SIGCONT)
    cluster.await_end()
    assert [plan.sources for plan in cluster.plans] == [{1: 1}]
    assert_same(cluster.results(), undisturbed("fsdp2"))
