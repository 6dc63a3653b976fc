"""Engine for every torch: build new backends in helper threads, then replace the old ones inside the groups.

A constructor that waits for a peer which died between publishing its address and connecting has no socket to shut
yet. Therefore it runs in a helper thread with a short connect time-out, and a newer generation abandons the thread.
Old backends are dropped in the background: their destructors join threads, 5 to 20 ms each.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from flashrec.runtime import gloo, nccl
from flashrec.runtime.board import Board
from flashrec.runtime.engine import Group
from flashrec.runtime.errors import NotUnblockable, RecoveryFailed
from flashrec.runtime.limits import Limits
from flashrec.runtime.timeline import Timeline, Watch
from flashrec.runtime.torch_private import groups as private
from flashrec.runtime.torch_private import versions

DISPOSE_THREAD = "flashrec-dispose"
MakeStore = Callable[[str, tuple[int, ...], int, float], private.Store]


class InPlaceEngine:
    """See `flashrec.runtime.engine.Engine`."""

    NAME = "inplace"

    def __init__(
        self,
        board: Board,
        make_store: MakeStore,
        replacer: private.Replacer,
        address: str,
        interface: str,
        limits: Limits,
        timeline: Timeline,
    ) -> None:
        self._board, self._make_store, self._replacer = board, make_store, replacer
        self._address, self._interface = address, interface
        self._limits, self._timeline = limits, timeline
        self._stores: dict[str, list[private.Store]] = {}  # a backend uses its store later, too: keep it as long
        self._nccl: dict[str, Any] = {}
        self._kept: list[tuple[int, list[socket.socket]]] = []  # (fence, connections it has cut), see gloo.shut
        self._disposing: list[threading.Thread] = []
        self._unblocking = threading.Lock()  # a fence does it in the control thread, a pause in the main thread

    def form(self, groups: list[Group], generation: int, timeout_s: float) -> None:
        watch = Watch()
        former = gloo.connections(self._listening())
        built = _Build(self._board, generation, len(groups))
        for group in groups:
            run = threading.Thread(
                target=built.run, args=(group, self._build, timeout_s), name="flashrec-form", daemon=True
            )
            run.start()
        done = built.wait(timeout_s)
        build_ms = watch.ms()
        retired: list[list[Any]] = []
        num_replaced = 0
        for group in groups:
            backends, stores = done[group.name]
            new = {torch.device(device): (kind, backend) for device, (kind, backend) in backends.items()}
            if not private.holds(group.handle, new):
                retired.append(self._replacer.replace(group.handle, new, group.name, group.handle.group_desc))
                num_replaced += 1
            retired.append(self._stores.pop(group.name, []))
            self._stores[group.name] = stores
            self._nccl[group.name] = nccl.backend_in(backends)
        self._check_unblockable(groups, generation, former)
        retired += [cut for fence, cut in self._kept if fence <= generation]
        self._kept = [(fence, cut) for fence, cut in self._kept if fence > generation]
        disposing = threading.Thread(target=retired.clear, name=DISPOSE_THREAD, daemon=True)
        disposing.start()
        self._disposing = [*(thread for thread in self._disposing if thread.is_alive()), disposing]
        self._timeline.mark(
            "formed",
            generation=generation,
            groups=len(groups),
            replaced=num_replaced,
            build_ms=build_ms,
            swap_ms=watch.ms() - build_ms,
        )

    def unblock(self, groups: list[Group]) -> int:
        with self._unblocking:
            cut = gloo.shut(self._listening(before=self._board.announced))
            self._kept = [*self._kept, (self._board.announced, cut)]
        return len(cut) + nccl.abort([backend for backend in self._nccl.values() if backend is not None])

    def drain(self, timeout_s: float) -> None:
        """The destructor of a gloo backend returns when its queue is empty and its threads have ended."""
        for thread in self._disposing:
            thread.join(timeout_s)
            if thread.is_alive():
                raise NotUnblockable(f"operations of the former process groups have not ended within {timeout_s:g} s")

    def _build(self, group: Group, generation: int, timeout_s: float) -> _Backends:
        by_name: dict[str, Any] = {}
        stores: list[private.Store] = []
        found: dict[str, tuple[Any, Any]] = {}
        for device, (name, kind) in private.backend_types(group.backend).items():
            if name not in by_name:
                store = self._make_store(store_name(group, name), group.ranks, generation, timeout_s)
                by_name[name], used = self._connect(name, group, store, generation)
                stores += [store, used]
            found[device] = (kind, by_name[name])
        return found, stores

    def _connect(self, name: str, group: Group, store: private.Store, generation: int) -> tuple[Any, private.Store]:
        """(a backend that is connected to its peers of `generation`, the store that it keeps). In a helper thread."""
        if name == "gloo":
            device = private.gloo_device(self._address, self._interface)
            connect_timeout_s = self._limits.connect_timeout_s
            backend = private.gloo_backend(
                store, group.group_rank, group.size, device, connect_timeout_s, group.timeout
            )
            return backend, store
        if name == "nccl":
            return nccl.build(group, store), store
        raise RecoveryFailed(
            f"group {group.name} uses the backend {name!r}; supported are gloo and nccl, and nccl2 with torch 2.14 "
            "and its native engine"
        )

    def _listening(self, before: int | None = None) -> set[gloo.Address]:
        """Where gloo of this process and its peers has listened, in generations older than `before`."""
        found: set[gloo.Address] = set()
        for generation, _, table in self._board.tables():
            if before is None or generation < before:
                found |= gloo.addresses(table.values())
        return found

    def _check_unblockable(self, groups: list[Group], generation: int, former: set[gloo.Ends]) -> None:
        """Make sure *before* training that we will find something to shut. Raises NotUnblockable."""
        made = gloo.connections(self._listening()) - former
        tables = {
            name: table for table_generation, name, table in self._board.tables() if table_generation == generation
        }
        for group in groups:
            if "gloo" not in {name for name, _ in private.backend_types(group.backend).values()}:
                continue
            listening = gloo.addresses(tables.get(store_name(group, "gloo"), {}).values())
            num_found = sum(not listening.isdisjoint(ends) for ends in made)
            if num_found < group.size - 1:
                raise NotUnblockable(
                    f"group {group.name} has {group.size} ranks, but only {num_found} of its {group.size - 1} "
                    "connections were recognised, so a failure could not be made known to this rank. This torch "
                    f"or its gloo behaves differently; supported: torch {versions.SUPPORTED_TEXT}"
                )


_Backends = tuple[dict[str, tuple[Any, Any]], list[private.Store]]  # device type -> (backend type, backend); stores


class _Build:
    """What the helper threads of one generation have built."""

    def __init__(self, board: Board, generation: int, num_groups: int) -> None:
        self._board, self._generation, self._num_groups = board, generation, num_groups
        self._done: dict[str, _Backends] = {}
        self._errors: list[Exception] = []

    def run(self, group: Group, build: Callable[[Group, int, float], _Backends], timeout_s: float) -> None:
        try:
            done = build(group, self._generation, timeout_s)
        except Exception as err:  # handed to the main thread
            self._errors.append(err)
        else:
            self._done[group.name] = done
        self._board.wake()

    def wait(self, timeout_s: float) -> dict[str, _Backends]:
        def ready() -> bool | None:
            return True if self._errors or len(self._done) == self._num_groups else None

        self._board.wait(ready, self._generation, timeout_s, "the peers of our process groups")
        if self._errors:
            raise self._errors[0]
        return self._done


def store_name(group: Group, backend: str) -> str:
    """Name of a group on the wire: two groups may share a name, when their ranks are disjoint."""
    ranks = hashlib.blake2b(repr(group.ranks).encode(), digest_size=6).hexdigest()
    return f"{group.name}/{backend}/{ranks}"
