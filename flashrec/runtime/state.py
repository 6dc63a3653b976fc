"""The training state of one rank as an ordered list of named tensors, plus a manifest that describes the rest.

Restoring happens into the storage that exists: parameters keep their addresses, so DDP's buckets, views and fused
optimizers stay valid. Only optimizer state that does not exist yet is allocated, from the manifest.

Of a DTensor the local part travels. Its specification says which part of what it is: only the same part is accepted.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from flashrec.runtime import codec, shards
from flashrec.runtime import seed as seeds
from flashrec.runtime.errors import CannotEncode, LayoutMismatch
from flashrec.runtime.parallel import zero
from flashrec.runtime.snapshot import Stateful


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor as it travels. device: type only; each side uses its own index. sharding: of a DTensor, then `shape`
    is that of the local part."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    sharding: shards.Sharding | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        part = shards.local(tensor)
        sharding = shards.sharding_of(tensor)
        return cls(name, tuple(part.shape), codec.dtype_name(part.dtype), part.device.type, sharding)

    @property
    def is_replicated(self) -> bool:
        """Parameters and their optimizer state are equal on all replicas; buffers and objects may differ by rank."""
        return self.name.startswith(("parameter ", "optimizer "))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * codec.dtype_of(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (f" {self.sharding}" if self.sharding else "")


class OptimizerSpec(msgspec.Struct, frozen=True):
    """One optimizer: hyper-parameters per group and non-tensor state per parameter, both in `codec` bytes."""

    groups: bytes
    sizes: tuple[int, ...]  # parameters per group
    values: bytes  # {parameter index: {key: value that is no tensor}}
    tensors: dict[int, dict[str, TensorSpec]]  # parameter index -> key -> tensor
    order: tuple[tuple[int, tuple[str, ...]], ...]  # optimizer.state as it is ordered: state_dict() shows it


class Manifest(msgspec.Struct, frozen=True):
    """Everything about the state but the tensors' bytes."""

    v: int
    model: tuple[TensorSpec, ...]
    optimizers: tuple[OptimizerSpec, ...]
    objects: dict[str, bytes]
    aside: tuple[TensorSpec, ...]  # large tensors of the objects, which travel like those of the model
    random: bytes | None  # the source's generators, only with Session(seed=None)
    parts: dict[str, bytes]  # of each `Part`

    def specs(self) -> list[TensorSpec]:
        """Every tensor whose bytes go with this manifest, in the order of `State.tensors()`."""
        found = list(self.model)
        for optimizer in self.optimizers:
            for number, keys in optimizer.order:
                tensors = optimizer.tensors.get(number, {})
                found += [tensors[key] for key in keys if key in tensors]
        return [*found, *self.aside]


class State:
    """Parameters, buffers, optimizers and registered objects of this rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        objects: Mapping[str, Stateful],
        sends_random_state: bool,
    ) -> None:
        self._model, self._optimizers, self._objects = model, optimizers, objects
        self._sends_random_state = sends_random_state
        self._aside: list[torch.Tensor] = []  # as the manifest in hand describes them
        self._before: dict[tuple[str, int], _Known] = {}
        self._specs: dict[tuple[str, int], _Known] = {}  # those of the newest manifest: with mirrors one a step is made
        # FSDP puts gathered parameters in the place of these while it computes; the optimizer keeps these.
        self._parameters = list(model.named_parameters())
        for name, tensor in self._model_tensors():
            if type(shards.local(tensor)) not in (torch.Tensor, torch.nn.Parameter):
                raise NotImplementedError(
                    f"{name} is a {type(tensor).__name__} of {type(shards.local(tensor)).__name__}: only plain tensors "
                    "and DTensors of plain tensors can be restored"
                )
        self._describe_objects([])  # what cannot be encoded shall fail at the start, not in a recovery

    def manifest(self, v: int, parts: dict[str, bytes]) -> Manifest:
        """Describe the state as it is now. Raises CannotEncode."""
        self._aside = []
        objects = self._describe_objects(self._aside)
        self._before, self._specs = self._specs, {}
        return Manifest(
            v=v,
            model=tuple(self._spec(name, tensor) for name, tensor in self._model_tensors()),
            optimizers=tuple(self._describe(i, optimizer) for i, optimizer in enumerate(self._optimizers)),
            objects=objects,
            aside=tuple(TensorSpec.of(f"aside {i}", tensor) for i, tensor in enumerate(self._aside)),
            random=codec.encode(seeds.state(), "random state") if self._sends_random_state else None,
            parts=parts,
        )

    def in_this_world(self, manifest: Manifest) -> Manifest:
        """The manifest of a rank of another world as one of this rank's world: sizes of mesh dimensions in which all
        ranks hold the same are those of the meshes here."""
        sizes = shards.mesh_sizes(tensor for _, tensor in self._model_tensors())

        def moved(spec: TensorSpec) -> TensorSpec:
            if spec.sharding is None:
                return spec
            return msgspec.structs.replace(spec, sharding=shards.resized(spec.sharding, sizes))

        return msgspec.structs.replace(
            manifest,
            model=tuple(map(moved, manifest.model)),
            optimizers=tuple(
                msgspec.structs.replace(
                    optimizer,
                    tensors={
                        number: {key: moved(spec) for key, spec in tensors.items()}
                        for number, tensors in optimizer.tensors.items()
                    },
                )
                for optimizer in manifest.optimizers
            ),
        )

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state, in an order that the manifest fixes; of a DTensor the local part."""
        found = [shards.local(tensor) for _, tensor in self._model_tensors()]
        for optimizer in self._optimizers:
            for entries in zero.state_of(optimizer).values():
                found += [shards.local(value) for value in entries.values() if isinstance(value, torch.Tensor)]
        return found + self._aside

    def prepare(self, manifest: Manifest) -> None:
        """Check that the source's model is ours and allocate what optimizer state is missing. Raises LayoutMismatch."""
        mine = {name: TensorSpec.of(name, tensor) for name, tensor in self._model_tensors()}
        theirs = {spec.name: spec for spec in manifest.model}
        _compare("the model", mine, theirs)
        if list(mine) != list(theirs):
            raise LayoutMismatch("source and target hold the tensors of the model in a different order")
        if len(manifest.optimizers) != len(self._optimizers):
            raise LayoutMismatch(
                f"the source has {len(manifest.optimizers)} optimizers, this rank {len(self._optimizers)}: "
                "create the same Session on every rank"
            )
        for i, (optimizer, spec) in enumerate(zip(self._optimizers, manifest.optimizers, strict=True)):
            _allocate(f"optimizer {i}", optimizer, spec)
        if manifest.objects.keys() != self._objects.keys():
            raise LayoutMismatch(
                f"the source registered state {sorted(manifest.objects)}, this rank {sorted(self._objects)}: "
                "create the same Session on every rank"
            )
        self._aside = [
            torch.empty(spec.shape, dtype=codec.dtype_of(spec.dtype), device=spec.device) for spec in manifest.aside
        ]

    def finish(self, manifest: Manifest) -> None:
        """After the tensors have arrived: load what the manifest itself carries."""
        for name, data in manifest.objects.items():
            self._objects[name].load_state_dict(codec.decode(data, self._aside))
        self._aside = []
        for optimizer, spec in zip(self._optimizers, manifest.optimizers, strict=True):
            for group, hyper in zip(optimizer.param_groups, codec.decode(spec.groups), strict=True):
                group.update(hyper)
        if manifest.random is not None:
            seeds.set_state(codec.decode(manifest.random))

    def _spec(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        key = name, id(tensor)
        known = self._before.get(key)
        if known is None or known.tensor() is not tensor or known.looks != _looks(tensor):
            known = _Known(weakref.ref(tensor), _looks(tensor), TensorSpec.of(name, tensor))
        self._specs[key] = known
        return known.spec

    def _model_tensors(self) -> list[tuple[str, torch.Tensor]]:
        params: list[tuple[str, torch.Tensor]] = [(f"parameter {name}", param) for name, param in self._parameters]
        return params + [(f"buffer {name}", buffer) for name, buffer in self._model.named_buffers()]

    def _describe_objects(self, aside: list[torch.Tensor]) -> dict[str, bytes]:
        return {
            name: codec.encode(item.state_dict(), f"state[{name!r}]", aside) for name, item in self._objects.items()
        }

    def _describe(self, number: int, optimizer: torch.optim.Optimizer) -> OptimizerSpec:
        name = f"optimizer {number}"
        hyper = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        values: dict[int, dict[str, Any]] = {}
        tensors: dict[int, dict[str, TensorSpec]] = {}
        order: list[tuple[int, tuple[str, ...]]] = []
        index = {id(param): i for i, param in enumerate(_params(optimizer))}
        for param, entries in zero.state_of(optimizer).items():
            i = index.get(id(param), -1)
            if i < 0:
                raise CannotEncode(f"{name}.state has the key {param!r:.60}, which is none of its parameters")
            order.append((i, tuple(entries)))
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    tensors.setdefault(i, {})[key] = self._spec(f"{name} parameter {i} {key}", value)
                else:
                    values.setdefault(i, {})[key] = value
        return OptimizerSpec(
            groups=codec.encode(hyper, f"{name}.param_groups"),
            sizes=tuple(len(group["params"]) for group in optimizer.param_groups),
            values=codec.encode(values, f"{name}.state"),
            tensors=tensors,
            order=tuple(order),
        )


class _Known(NamedTuple):
    """What was found out about a tensor. A tensor that is replaced must not be kept alive by it."""

    tensor: weakref.ref[torch.Tensor]
    looks: tuple[torch.Size, torch.dtype, torch.device]
    spec: TensorSpec


def _looks(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _params(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _allocate(name: str, optimizer: torch.optim.Optimizer, spec: OptimizerSpec) -> None:
    sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
    if sizes != spec.sizes:
        raise LayoutMismatch(f"{name} has parameter groups of {spec.sizes} parameters at the source, {sizes} here")
    values = codec.decode(spec.values)
    params, state = _params(optimizer), zero.state_of(optimizer)
    old = dict(state)
    state.clear()
    for i, keys in spec.order:
        param = params[i]
        entries: dict[str, Any] = {}
        for key in keys:
            tensor, have = spec.tensors.get(i, {}).get(key), old.get(param, {}).get(key)
            if tensor is None:
                entries[key] = values[i][key]
            elif isinstance(have, torch.Tensor) and TensorSpec.of(tensor.name, have) == tensor:
                entries[key] = have
            else:
                entries[key] = _empty(tensor, param)
        state[param] = entries


def _empty(spec: TensorSpec, param: torch.Tensor) -> torch.Tensor:
    dtype = codec.dtype_of(spec.dtype)
    device = param.device if param.device.type == spec.device else torch.device(spec.device)
    if spec.sharding is not None:
        built = shards.empty(param, spec.sharding, spec.shape, dtype, device)
        if built is None:
            raise LayoutMismatch(f"{spec.name} is {spec} at the source, which cannot be built for {_shown(param)} here")
        return built
    if shards.is_dtensor(param):
        return torch.empty(spec.shape, dtype=dtype, device=device)
    if tuple(param.shape) == spec.shape and dtype == param.dtype and device == param.device:
        return torch.empty_like(param, memory_format=torch.preserve_format).detach()
    return torch.empty(spec.shape, dtype=dtype, device=device)


def _shown(param: torch.Tensor) -> str:
    return f"a parameter {TensorSpec.of('', param)}"


def _compare(what: str, mine: dict[str, TensorSpec], theirs: dict[str, TensorSpec]) -> None:
    differences = [f"{name}: only at the source" for name in theirs.keys() - mine.keys()]
    differences += [f"{name}: only at the target" for name in mine.keys() - theirs.keys()]
    differences += [
        f"{name}: {theirs[name]} at the source, {mine[name]} here"
        for name in mine.keys() & theirs.keys()
        if mine[name] != theirs[name]
    ]
    if differences:
        shown = "; ".join(sorted(differences)[:5])
        raise LayoutMismatch(
            f"{what} differs between source and target ({len(differences)} tensors): {shown}. "
            "Every rank must build the same model, also when it is started again"
        )
