"""Every kind of collective, each with what it must give, and the objects of torch that hold a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

Group = Any
Kind = Callable[[Group], tuple[Any, Any]]  # what was found, what is wanted


def _mine(group: Group, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(dist.get_rank(group)))


def _all(group: Group, size: int = 4) -> list[torch.Tensor]:
    return [torch.full((size,), float(rank)) for rank in range(dist.get_world_size(group))]


def all_reduce(group: Group) -> tuple[Any, Any]:
    value = _mine(group)
    dist.all_reduce(value, group=group)
    return value, sum(_all(group))


def all_reduce_async(group: Group) -> tuple[Any, Any]:
    values = [_mine(group, size) for size in (1, 5, 1000)]
    works = [dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group, async_op=True) for value in values]
    for work in works:
        work.wait()
    return torch.cat(values), torch.full((1006,), dist.get_world_size(group) - 1.0)


def all_reduce_coalesced(group: Group) -> tuple[Any, Any]:
    values = [_mine(group, 3), _mine(group, 7)]
    dist.all_reduce_coalesced(values, group=group)
    return torch.cat(values), sum(_all(group, 10))


def broadcast(group: Group) -> tuple[Any, Any]:
    value = _mine(group)
    dist.broadcast(value, group_src=1, group=group)
    return value, torch.ones(4)


def reduce(group: Group) -> tuple[Any, Any]:
    value = _mine(group)
    dist.reduce(value, group_dst=0, group=group)
    return (value, sum(_all(group))) if dist.get_rank(group) == 0 else (0, 0)


def all_gather(group: Group) -> tuple[Any, Any]:
    found = [torch.empty(4) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, _mine(group), group=group)
    return torch.stack(found), torch.stack(_all(group))


def all_gather_into_tensor(group: Group) -> tuple[Any, Any]:
    found = torch.empty(4 * dist.get_world_size(group))
    dist.all_gather_into_tensor(found, _mine(group), group=group)
    return found, torch.cat(_all(group))


def reduce_scatter_tensor(group: Group) -> tuple[Any, Any]:
    found = torch.empty(4)
    dist.reduce_scatter_tensor(found, torch.cat(_all(group)), group=group)
    return found, _mine(group) * dist.get_world_size(group)


def gather(group: Group) -> tuple[Any, Any]:
    is_root = dist.get_rank(group) == 0
    found = [torch.empty(4) for _ in range(dist.get_world_size(group))] if is_root else None
    dist.gather(_mine(group), found, group_dst=0, group=group)
    return (torch.stack(found), torch.stack(_all(group))) if found else (0, 0)


def scatter(group: Group) -> tuple[Any, Any]:
    found = torch.empty(4)
    dist.scatter(found, _all(group) if dist.get_rank(group) == 0 else None, group_src=0, group=group)
    return found, _mine(group)


def all_to_all_single(group: Group) -> tuple[Any, Any]:
    found, size = torch.empty(dist.get_world_size(group)), dist.get_world_size(group)
    dist.all_to_all_single(found, torch.arange(float(size)), group=group)
    return found, _mine(group, size)


def send_and_recv(group: Group) -> tuple[Any, Any]:
    rank, size, found = dist.get_rank(group), dist.get_world_size(group), torch.empty(4)
    ops = [
        dist.P2POp(dist.isend, _mine(group), group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, found, group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return found, torch.full((4,), float((rank - 1) % size))


def barrier(group: Group) -> tuple[Any, Any]:
    dist.barrier(group=group)
    return 0, 0


def objects(group: Group) -> tuple[Any, Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, {"rank": dist.get_rank(group)}, group=group)
    return found, [{"rank": rank} for rank in range(dist.get_world_size(group))]


def functional_collectives(group: Group) -> tuple[Any, Any]:
    found = [
        functional.all_reduce(_mine(group), "sum", group) + 0,
        functional.all_gather_tensor(_mine(group), 0, group) + 0,
        functional.reduce_scatter_tensor(torch.cat(_all(group)), "sum", 0, group) + 0,
    ]
    wanted = [sum(_all(group)), torch.cat(_all(group)), _mine(group) * dist.get_world_size(group)]
    return torch.cat(found), torch.cat(wanted)  # type: ignore[arg-type]


KINDS: tuple[Kind, ...] = (
    all_reduce, all_reduce_async, all_reduce_coalesced, broadcast, reduce, all_gather, all_gather_into_tensor,
    reduce_scatter_tensor, gather, scatter, all_to_all_single, send_and_recv, barrier, objects, functional_collectives,
)  # fmt: skip


def dtensor(mesh: DeviceMesh) -> tuple[Any, Any]:
    """A matrix product whose operands are spread over `mesh`, of which no rank holds all."""
    left, right = torch.arange(32.0).reshape(8, 4), torch.arange(32.0).reshape(4, 8)
    spread_left: DTensor = distribute_tensor(left, mesh, [Shard(1)], src_data_rank=None)
    spread_right: DTensor = distribute_tensor(right, mesh, [Shard(0)], src_data_rank=None)
    product = (spread_left @ spread_right).redistribute(mesh, [Replicate()])
    return product.to_local(), left @ right


def is_right(found: tuple[Any, Any]) -> bool:
    have, want = found
    return torch.equal(have, want) if isinstance(have, torch.Tensor) else have == want
