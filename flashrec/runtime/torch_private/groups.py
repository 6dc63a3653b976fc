"""Process groups: how the script's groups are caught as they are made, and what is put inside them.

Replacing a backend in place, two ways:

* `release`: the exported C++ symbol `ProcessGroup::release_resources()`, called through ctypes, clears the maps of the
  group; the new backend is then registered under its true type. Nothing is left behind.
* `fresh key`: registering under an enum value never used before replaces the device's entry. The old backend stays in
  the map (threads and descriptors leak), and there are about 190 values. Only used where `release` does not work.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

Store = torch._C._distributed_c10d.Store
_c10d_module: Any = c10d
_dist: Any = dist  # names that torch exports without saying so

SHADOW_BACKEND = "flashrec_shadow"
_RELEASE_SYMBOL = "_ZN4c10d12ProcessGroup17release_resourcesEv"
_FIRST_FRESH_KEY, _LAST_FRESH_KEY = 64, 255

NewGroup = Callable[[str, "dist.ProcessGroup", dict[str, Any]], None]


def find_release() -> Callable[[int], None] | None:
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        function = library[_RELEASE_SYMBOL]
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], None
    release: Callable[[int], None] = function
    return release


class Replacer:
    """Replaces the backends inside a process group; the group object, and all who hold it, stay."""

    def __init__(self, release: Callable[[int], None] | None) -> None:
        self._release = release
        self._next_key = _FIRST_FRESH_KEY
        self._has_true_type: set[tuple[str, Any]] = set()  # groups whose true type is taken by an older backend

    @classmethod
    def best(cls, can_release: bool) -> Replacer:
        return cls(find_release() if can_release else None)

    def replace(
        self, group: dist.ProcessGroup, new: dict[torch.device, tuple[Any, Any]], name: str, desc: str
    ) -> list[Any]:
        """Put `new` (device -> (backend type, backend)) in. Returns the old backends, to be dropped off the hot path.

        Raises RuntimeError when the group does not hold the new backends afterwards.
        """
        old = [group._get_backend(device) for device in group._device_types]
        if self._release is not None:
            self._release(group._id())  # type: ignore[attr-defined]
            for device, (kind, backend) in new.items():
                group._register_backend(device, kind, backend)
            group._set_default_backend(default_type(kind for kind, _ in new.values()))
        else:
            keys: dict[int, Any] = {}
            for device, (kind, backend) in new.items():
                if id(backend) not in keys:
                    keys[id(backend)] = self._fresh_key(name, kind)
                group._register_backend(device, keys[id(backend)], backend)
            # The default stays a type that torch can name; it is asked for its name only, work goes by device.
            group._set_default_backend(default_type(kind for kind, _ in new.values()))
        group._set_group_name(c10d.GroupName(name))  # the name lives in the backend; functional collectives look it up
        group._set_group_desc(desc)
        for device, (_, backend) in new.items():
            if group._get_backend(device) is not backend:
                raise RuntimeError(f"the backend of group {name} for {device} was not replaced")
        return old

    def _fresh_key(self, name: str, kind: Any) -> Any:
        if (name, kind) not in self._has_true_type:
            self._has_true_type.add((name, kind))
            return kind
        if self._next_key > _LAST_FRESH_KEY:
            raise RuntimeError("this process has used up its backend replacements; it must be restarted")
        self._next_key += 1
        return dist.ProcessGroup.BackendType(self._next_key - 1)


def holds(group: dist.ProcessGroup, new: dict[torch.device, tuple[Any, Any]]) -> bool:
    """True when the group has exactly these backends already."""
    return all(group._get_backend(device) is backend for device, (_, backend) in new.items())


def backend_of(group: dist.ProcessGroup, name: str, backend: str) -> Any:
    """What is in the group for the first device that the backend `name` of the backend string serves."""
    device = next(device for device, (found, _) in backend_types(backend).items() if found == name)
    return group._get_backend(torch.device(device))


def default_type(kinds: Any) -> Any:
    """The backend type a group reports when it holds several."""
    found = list(kinds)
    nccl = dist.ProcessGroup.BackendType.NCCL
    return nccl if nccl in found else found[0]


def backend_types(backend: str) -> dict[str, tuple[str, Any]]:
    """Device type -> (backend name, backend type) of a backend string such as 'gloo' or 'cpu:gloo,cuda:nccl'."""
    devices = c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    return {device: (str(name), dist.Backend.backend_type_map[str(name)]) for device, name in devices.items()}


def backend_names(backend: str) -> frozenset[str]:
    """{'gloo'}, {'gloo', 'nccl'}, …: who carries the collectives of a group."""
    return frozenset(name for name, _ in backend_types(backend).values())


def fake_class() -> Any:
    return getattr(torch._C._distributed_c10d, "FakeProcessGroup", None)


def fake_backend(rank: int, size: int) -> Any:
    """A backend whose collectives do nothing: for models that are built without peers."""
    return fake_class()._create_internal(rank, size)


def install(on_new_group: NewGroup, make_store: Callable[[], Store], rank: int, world_size: int) -> None:
    """Let every group of this process be born with the shadow backend and handed to `on_new_group`.

    The user's script keeps saying `init_process_group("gloo")`; its store becomes `make_store()`.
    """
    dist.Backend.register_backend(
        SHADOW_BACKEND,
        lambda options, _: fake_backend(options.group_rank, options.group_size),
        extended_api=True,
        devices=["cpu", "cuda"],
    )
    torch_helper = c10d._new_process_group_helper

    @functools.wraps(torch_helper)
    def helper(
        group_size: int,
        group_rank: int,
        ranks: list[int],
        backend: Any,
        store: Any,
        name: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        shadow = ",".join(f"{device}:{SHADOW_BACKEND}" for device in backend_types(str(backend)))
        group, prefix = torch_helper(group_size, group_rank, ranks, dist.Backend(shadow), store, name, *args, **kwargs)
        if isinstance(group, dist.ProcessGroup) and group.group_name == name:
            group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            c10d._world.pg_map[group] = (backend, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(backend)))
            facts = {
                "ranks": tuple(ranks) or tuple(range(group_size)),
                "group_rank": group_rank,
                "backend": str(backend),
                "timeout": kwargs.get("timeout"),
                "options": kwargs.get("backend_options"),
            }
            on_new_group(str(name), group, facts)
        return group, prefix

    def rendezvous(*_args: Any, **_kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        yield make_store(), rank, world_size

    # Inside init_process_group, not around it: scripts import that function by name before we come.
    c10d._new_process_group_helper = helper  # type: ignore[assignment]
    _c10d_module.rendezvous = rendezvous


def num_issued(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has issued in `group` since its backend is there."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def is_alive(group: dist.ProcessGroup) -> bool:
    """False once the script has destroyed the group."""
    return group in c10d._world.pg_map


def gloo_backend(store: Store, rank: int, size: int, device: Any, connect_timeout_s: float, timeout: timedelta) -> Any:
    """A connected gloo backend. `device`: from `gloo_device`. Raises RuntimeError (also out of `store`)."""
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=connect_timeout_s)  # bounds the connecting only
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend.set_timeout(timeout)
    return backend


def gloo_device(address: str, interface: str) -> Any:
    """An eager gloo device of its own, on `interface` where given, else on `address`."""
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",", maxsplit=1)[0], lazy_init=False)
    return dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)


def nccl_backend(store: Store, rank: int, ranks: tuple[int, ...], name: str, options: Any, timeout: timedelta) -> Any:
    """An NCCL backend whose init can be aborted. Written from the sources, never run here."""
    mine = options if options is not None else dist.ProcessGroupNCCL.Options()
    mine.config.blocking = 0
    mine._timeout = timeout
    mine.global_ranks_in_group, mine.group_name = list(ranks), name
    backend = dist.ProcessGroupNCCL(store, rank, len(ranks), mine)
    backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return backend


def is_nccl(backend: Any) -> bool:
    """True for a backend of NCCL, the one of torch 2.14 (nccl2) included."""
    return type(backend).__name__.startswith("ProcessGroupNCCL")


def nccl_abort(backends: list[Any]) -> None:
    """Abort all communicators in one NCCL group, so that no order between them can block."""
    grouped = [backend for backend in backends if hasattr(backend, "_group_start")]  # nccl2 has no such call
    if grouped:
        grouped[0]._group_start()
    for backend in backends:
        backend.abort()
    if grouped:
        grouped[0]._group_end()
