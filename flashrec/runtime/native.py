"""Engine for torch 2.14 and later: the backend inside a group stays and is connected anew, by `reconfigure`.

Only where a connected backend comes from differs from `inplace`, so this is that engine with another `_connect`.
torch's own entrance (`dist._reconfigure`) takes groups of one backend only; we speak to the backends themselves, which
serves a group of 'cpu:gloo,cuda:nccl2', too.

A backend is *not* reconfigured but replaced, as in `inplace`,

* when its former reconfiguration was abandoned and has not returned: the next one would wait for it, up to the connect
  time-out, and it could connect the backend to the wrong peers later than that one;
* when an operation of the old generation is still in it, or that cannot be seen: it runs in the threads of the backend,
  and an operation that gloo has lost would block one of them for ever;
* when it is of a kind that has no `reconfigure` (nccl), which is said once.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch

from flashrec.runtime import nccl, stuck
from flashrec.runtime.engine import Group
from flashrec.runtime.errors import UnsupportedTorch
from flashrec.runtime.inplace import InPlaceEngine
from flashrec.runtime.timeline import logger
from flashrec.runtime.torch_private import groups as private
from flashrec.runtime.torch_private import reconfigure as native
from flashrec.runtime.torch_private import versions

_SETTLE_TIMEOUT_S = 0.2  # operations that were cut have ended within milliseconds
_HANDLE = "handle/{}"


class Rendezvous(private.Store):
    """The one store a backend keeps; each generation puts its own behind it."""

    def __init__(self, name: str = "") -> None:
        """name: of the backend that keeps it."""
        super().__init__()
        self.name = name
        self.current: private.Store | None = None
        self.busy = threading.Lock()  # held while the backend is being reconfigured

    @property
    def _inner(self) -> Any:
        if self.current is None:
            raise RuntimeError("this process group is not connected yet")
        return self.current

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._inner.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._inner.multi_get(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """gloo claims the number of a reconfiguration so. Ours belongs to one generation: nobody else can have it."""
        return desired if isinstance(desired, bytes) else str(desired).encode()

    def delete_key(self, key: str) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored, as in the stores behind it."""

    def has_extended_api(self) -> bool:
        return False


class NativeEngine(InPlaceEngine):
    """See `flashrec.runtime.engine.Engine`."""

    NAME = "native"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unfit = -1  # the generation for which no backend is used again
        self._has_told: set[str] = set()

    def form(self, groups: list[Group], generation: int, timeout_s: float) -> None:
        if any(group.name in self._stores for group in groups) and not stuck.await_idle(_SETTLE_TIMEOUT_S):
            logger.info("generation %d: an older operation has not ended, so backends are replaced", generation)
            self._unfit = generation
        super().form(groups, generation, timeout_s)

    def _connect(self, name: str, group: Group, store: private.Store, generation: int) -> tuple[Any, Any]:
        if name not in ("gloo", "nccl2"):
            if name not in self._has_told:
                self._has_told.add(name)
                logger.warning("%s cannot be reconfigured by this torch: its backends are replaced instead", name)
            return super()._connect(name, group, store, generation)
        backend, rendezvous = private.backend_of(group.handle, name, group.backend), self._rendezvous(group, name)
        is_fit = rendezvous is not None and not rendezvous.busy.locked() and native.can(backend)
        if rendezvous is None or not is_fit or self._unfit == generation:
            rendezvous = Rendezvous(name)
            backend = self._make(name, group, rendezvous)
        with rendezvous.busy:
            rendezvous.current = store
            store.set(_HANDLE.format(group.group_rank), native.handle_of(backend))
            handles = store.multi_get([_HANDLE.format(i) for i in range(group.size)])
            peers = [bytes(handle).decode() for handle in handles]
            native.reconfigure(backend, generation, peers, self._limits.connect_timeout_s)
        return backend, rendezvous

    def _rendezvous(self, group: Group, name: str) -> Rendezvous | None:
        """The store of the backend that is in the group; None when that is none of ours."""
        kept = self._stores.get(group.name, [])
        return next((store for store in kept if isinstance(store, Rendezvous) and store.name == name), None)

    def _make(self, name: str, group: Group, rendezvous: Rendezvous) -> Any:
        if name == "nccl2":
            return nccl.build_native(group, rendezvous)
        device = private.gloo_device(self._address, self._interface)
        return native.gloo_backend(rendezvous, group.group_rank, group.size, device, group.timeout)


def choose(wanted: str) -> type[InPlaceEngine]:
    """The engine of this process: 'native', 'inplace', or "" for the one that fits torch. Raises UnsupportedTorch."""
    if wanted == "inplace" or (not wanted and versions.current() < versions.RECONFIGURES):
        return InPlaceEngine
    if versions.current() < versions.RECONFIGURES:
        raise UnsupportedTorch(
            f"FLASHREC_ENGINE=native needs torch 2.14 or later, this is {torch.__version__}: unset it, or use inplace"
        )
    versions.require(native.needed())
    return NativeEngine
