"""The training state of one rank as an ordered list of named tensors, plus a manifest that describes the rest.

Restoring happens into the storage that exists: parameters keep their addresses, so DDP's buckets, views and fused
optimizers stay valid. Only optimizer state that does not exist yet is allocated, from the manifest.

Of a DTensor the local part travels. Its specification says which part of what it is: only the same part is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from flashrec.runtime import codec, shards
from flashrec.runtime import seed as seeds
from flashrec.runtime.errors import CannotEncode, LayoutMismatch
from flashrec.runtime.parallel import zero
from flashrec.runtime.snapshot import Stateful
from flashrec.runtime.specs import Specs, TensorSpec


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


class Described(NamedTuple):
    """A state at one moment. specs: `manifest.specs()`. tensors: one for each, of a DTensor the local part."""

    manifest: Manifest
    specs: list[TensorSpec]
    tensors: list[torch.Tensor]


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
        self._specs_of_model, self._specs_of_aside = Specs(), Specs()
        self._described = [_OptimizerState(number) for number in range(len(optimizers))]
        # FSDP puts gathered parameters in the place of these while it computes; the optimizer keeps these.
        parameters: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
        self._parameter_names = [f"parameter {name}" for name, _ in parameters]
        self._parameters = [param for _, param in parameters]
        for name, tensor in zip(*self._model_tensors(), strict=True):
            if type(shards.local(tensor)) not in (torch.Tensor, torch.nn.Parameter):
                raise NotImplementedError(
                    f"{name} is a {type(tensor).__name__} of {type(shards.local(tensor)).__name__}: only plain tensors "
                    "and DTensors of plain tensors can be restored"
                )
        self._describe_objects([])  # what cannot be encoded shall fail at the start, not in a recovery

    def manifest(self, v: int, parts: dict[str, bytes]) -> Manifest:
        """Describe the state as it is now. Raises CannotEncode."""
        return self.describe(v, parts).manifest

    def describe(self, v: int, parts: dict[str, bytes]) -> Described:
        """The state as it is now, and where it is. Raises CannotEncode."""
        self._aside = []
        objects = self._describe_objects(self._aside)
        names, tensors = self._model_tensors()
        found = shards.locals_of(tensors)
        model = self._specs_of_model.of(names, tensors, found)
        specs = list(model)
        optimizers = []
        for remembered, optimizer in zip(self._described, self._optimizers, strict=True):
            entries, places, spec = remembered.describe(optimizer)
            found += places
            specs += entries
            optimizers.append(spec)
        aside = self._specs_of_aside.of([f"aside {i}" for i in range(len(self._aside))], self._aside, self._aside)
        manifest = Manifest(
            v=v,
            model=model,
            optimizers=tuple(optimizers),
            objects=objects,
            aside=aside,
            random=codec.encode(seeds.state(), "random state") if self._sends_random_state else None,
            parts=parts,
        )
        return Described(manifest, [*specs, *aside], found + self._aside)

    def in_this_world(self, manifest: Manifest) -> Manifest:
        """The manifest of a rank of another world as one of this rank's world: sizes of mesh dimensions in which all
        ranks hold the same are those of the meshes here."""
        sizes = shards.mesh_sizes(self._model_tensors()[1])

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
        found = self._model_tensors()[1]
        for optimizer in self._optimizers:
            for entries in zero.state_of(optimizer).values():
                found += [value for value in entries.values() if isinstance(value, torch.Tensor)]
        return shards.locals_of(found) + self._aside

    def prepare(self, manifest: Manifest) -> None:
        """Check that the source's model is ours and allocate what optimizer state is missing. Raises LayoutMismatch."""
        names, tensors = self._model_tensors()
        model = self._specs_of_model.of(names, tensors, shards.locals_of(tensors))
        mine = {spec.name: spec for spec in model}
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

    def _model_tensors(self) -> tuple[list[str], list[torch.Tensor]]:
        """Names and tensors."""
        buffers = list(self._model.named_buffers())
        names = self._parameter_names + [f"buffer {name}" for name, _ in buffers]
        return names, self._parameters + [buffer for _, buffer in buffers]

    def _describe_objects(self, aside: list[torch.Tensor]) -> dict[str, bytes]:
        return {
            name: codec.encode(item.state_dict(), f"state[{name!r}]", aside) for name, item in self._objects.items()
        }


class _OptimizerState:
    """Describes one optimizer, and remembers what it said of its tensors."""

    def __init__(self, number: int) -> None:
        self._name = f"optimizer {number}"
        self._specs = Specs()
        self._found: tuple[TensorSpec, ...] | None = None
        self._tensors: dict[int, dict[str, TensorSpec]] = {}
        self._keys: list[tuple[int, str]] = []  # of each tensor
        self._names: list[str] = []

    def describe(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[tuple[TensorSpec, ...], list[torch.Tensor], OptimizerSpec]:
        """Each tensor of its state, where that is, and everything about the optimizer. Raises CannotEncode."""
        hyper = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        values: dict[int, dict[str, Any]] = {}
        keys: list[tuple[int, str]] = []
        tensors: list[torch.Tensor] = []
        order: list[tuple[int, tuple[str, ...]]] = []
        index = {id(param): i for i, param in enumerate(_params(optimizer))}
        for param, entries in zero.state_of(optimizer).items():
            i = index.get(id(param), -1)
            if i < 0:
                raise CannotEncode(f"{self._name}.state has the key {param!r:.60}, which is none of its parameters")
            order.append((i, tuple(entries)))
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    keys.append((i, key))
                    tensors.append(value)
                else:
                    values.setdefault(i, {})[key] = value
        parts = shards.locals_of(tensors)
        specs = self._specs_of(keys, tensors, parts)
        return (
            specs,
            parts,
            OptimizerSpec(
                groups=codec.encode(hyper, f"{self._name}.param_groups"),
                sizes=tuple(len(group["params"]) for group in optimizer.param_groups),
                values=codec.encode(values, f"{self._name}.state"),
                tensors=self._tensors,
                order=tuple(order),
            ),
        )

    def _specs_of(
        self, keys: list[tuple[int, str]], tensors: list[torch.Tensor], parts: list[torch.Tensor]
    ) -> tuple[TensorSpec, ...]:
        if keys != self._keys:
            self._keys, self._names = keys, [f"{self._name} parameter {i} {key}" for i, key in keys]
        specs = self._specs.of(self._names, tensors, parts)
        if specs is not self._found:
            self._found, self._tensors = specs, {}
            for (i, key), spec in zip(keys, specs, strict=True):
                self._tensors.setdefault(i, {})[key] = spec
        return specs


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
            elif isinstance(have, torch.Tensor) and tensor.describes(have):
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
