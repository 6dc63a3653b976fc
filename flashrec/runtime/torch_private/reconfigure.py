"""The reconfiguration that c10d backends have from torch 2.14 on.

A backend made with `enable_reconfigure` connects to nobody and refuses collectives until `reconfigure(uuid, handles)`,
which connects it to the peers in the order of their handles, and may be repeated. What it was measured to do (gloo,
2.14.1) and what we make of it is in docs/decisions/0022-two-engines.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from flashrec.runtime.torch_private.groups import Store

_c10d: Any = torch._C._distributed_c10d
_dist: Any = dist


def is_there() -> bool:
    """True when this torch can reconfigure gloo."""
    return all(hasattr(owner, name) for name, owner in needed())


def needed() -> Iterator[tuple[str, Any]]:
    """(private name, its owner) of what `versions.require` shall look for."""
    yield "ReconfigureOptions", _c10d
    for name in ("reconfigure", "get_reconfigure_handle", "supports_reconfigure"):
        yield name, _c10d.Backend
    yield "enable_reconfigure", _dist.ProcessGroupGloo._Options


def can(backend: Any) -> bool:
    """True for a backend that was made to be reconfigured (or could have been: those of ours all were)."""
    return bool(getattr(backend, "supports_reconfigure", False))


def gloo_backend(store: Store, rank: int, size: int, device: Any, timeout: timedelta) -> Any:
    """A gloo backend without peers. `store`: of all its reconfigurations, keep a reference. timeout: of collectives."""
    options = _dist.ProcessGroupGloo._Options()
    options._devices, options._timeout, options.enable_reconfigure = [device], timeout, True
    return _dist.ProcessGroupGloo(store, rank, size, options)


def nccl2_backend(store: Store, rank: int, ranks: tuple[int, ...], name: str, options: Any, timeout: timedelta) -> Any:
    """An nccl2 backend without peers. Written from the sources; made, but never connected here."""
    mine = options if options is not None else _dist.ProcessGroupNCCL.Options()
    mine.config.blocking = 0
    mine._timeout, mine.enable_reconfigure = timeout, True
    mine.global_ranks_in_group, mine.group_name = list(ranks), c10d.GroupName(name)
    return _c10d.ProcessGroupNCCL2(store, rank, len(ranks), mine)


def handle_of(backend: Any) -> str:
    """What the peers need to know of this backend for its next reconfiguration."""
    return str(backend.get_reconfigure_handle())


def reconfigure(backend: Any, number: int, handles: list[str], timeout_s: float) -> None:
    """Connect to the peers behind `handles` (in group order) and return. Calls on one backend wait for each other.

    number: never used before with this backend. After an error the backend has the connections that it had before.
    """
    options = _c10d.ReconfigureOptions()
    options.uuid, options.handles, options.timeout = number, handles, timedelta(seconds=timeout_s)
    backend.reconfigure(options).wait()
