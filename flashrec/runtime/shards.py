"""DTensor: which part of a tensor this rank holds. What travels and what is compared is the local part.

Nothing here imports torch.distributed.tensor: a script that does not use it shall not pay for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from flashrec.runtime.torch_private.tensors import local_of


class Sharding(msgspec.Struct, frozen=True, gc=False):
    """How a DTensor is spread. dims: (name, ranks, placement, index of our part) per mesh dimension; the index is -1
    where all ranks hold the same, so that replicas, and only they, have equal shardings."""

    shape: tuple[int, ...]  # of the whole tensor
    dims: tuple[tuple[str, int, str, int], ...]

    def __str__(self) -> str:
        dims = ", ".join(
            f"{name}={size}: {placement}" + (f" part {part}" if part >= 0 else "")
            for name, size, placement, part in self.dims
        )
        return f"of {list(self.shape)} over ({dims})"


def dtensor_class() -> type[Any] | None:
    """None where no script has asked for it, so that nothing can be one."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_dtensor(tensor: torch.Tensor) -> bool:
    kind = dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds: of a DTensor its shard, else the tensor itself. Detached, never a copy."""
    if is_dtensor(tensor):
        with torch.no_grad():
            found: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
            return found
    return tensor.detach()


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`local` of each, several times as fast."""
    kind = dtensor_class()
    if kind is None:
        return [tensor.detach() for tensor in tensors]
    return [(local_of(tensor) if isinstance(tensor, kind) else tensor).detach() for tensor in tensors]


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """None for a plain tensor."""
    if not is_dtensor(tensor):
        return None
    spread: Any = tensor
    mesh = spread.device_mesh
    coordinate = mesh.get_coordinate() or [-1] * mesh.ndim
    return Sharding(
        tuple(spread.shape),
        tuple(
            (name, mesh.size(dim), repr(placement), -1 if placement.is_replicate() else coordinate[dim])
            for dim, (name, placement) in enumerate(zip(dim_names(mesh), spread.placements, strict=True))
        ),
    )


def mesh_sizes(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Name of a mesh dimension in which all ranks hold the same -> ranks in it, here."""
    shardings = [sharding for tensor in tensors if (sharding := sharding_of(tensor)) is not None]
    return {name: size for sharding in shardings for name, size, _, part in sharding.dims if part < 0}


def resized(sharding: Sharding, sizes: Mapping[str, int]) -> Sharding:
    """The same part of the same tensor over a mesh with more or fewer replicas."""
    dims = tuple(
        (name, sizes.get(name, size) if part < 0 else size, placement, part)
        for name, size, placement, part in sharding.dims
    )
    return Sharding(sharding.shape, dims)


def holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """Global ranks that hold the same part of a DTensor: they differ from this one in replicated dimensions only."""
    spread: Any = tensor
    ranks, coordinate = spread.device_mesh.mesh, spread.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else coordinate[dim] for dim, placement in enumerate(spread.placements)
    )
    return tuple(sorted(ranks[index].reshape(-1).tolist()))


def spread_over(tensor: torch.Tensor) -> str:
    """For the user: "mesh dp=2 x tp=2, the same over dp"."""
    spread: Any = tensor
    mesh, names = spread.device_mesh, dim_names(spread.device_mesh)
    same = [name for name, placement in zip(names, spread.placements, strict=True) if placement.is_replicate()]
    shape = " x ".join(f"{name}={mesh.size(dim)}" for dim, name in enumerate(names))
    return f"mesh {shape}, " + (f"the same over {' and '.join(same)}" if same else "in no dimension the same")


def dim_names(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"dim {dim}" for dim in range(mesh.ndim)))


def empty(
    like: torch.Tensor, sharding: Sharding, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """An uninitialised DTensor on the mesh of `like`; shape: of the local part. None when this cannot be built here."""
    mine = sharding_of(like)
    if mine is None:
        return None
    spread: Any = like
    if mine == sharding and tuple(local(like).shape) == shape and like.device == device:
        return torch.empty_like(spread, dtype=dtype).detach()
    if [dim[:2] for dim in mine.dims] != [dim[:2] for dim in sharding.dims]:
        return None
    module = sys.modules["torch.distributed.tensor"]
    known = {repr(placement): placement for placement in spread.placements}
    known |= {repr(module.Replicate()): module.Replicate()}
    known |= {repr(module.Shard(dim)): module.Shard(dim) for dim in range(len(sharding.shape))}
    placements = [known.get(placement) for _, _, placement, _ in sharding.dims]
    if None in placements:
        return None
    stride = torch.empty(sharding.shape, device="meta").stride()
    built: torch.Tensor = module.DTensor.from_local(
        torch.empty(shape, dtype=dtype, device=device),
        spread.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(sharding.shape),
        stride=stride,
    )
    return built if sharding_of(built) == sharding else None
