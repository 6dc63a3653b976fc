"""NCCL: what makes its communicators abortable. Written from the sources and issues of torch; never run here.

Survivors hang in kernels until `abort`, which must cover all communicators in one NCCL group. The watchdog must not
end the process on its own account, hence `check_environment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from flashrec.runtime.engine import Group
from flashrec.runtime.torch_private import groups as private
from flashrec.runtime.torch_private import reconfigure

WANTED_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def check_environment(environ: Mapping[str, str]) -> list[str]:
    """Variables that would let NCCL's watchdog end a process that could recover: 'NAME=value' as they should be."""
    return [f"{name}={value}" for name, value in WANTED_ENVIRONMENT.items() if environ.get(name) != value]


def build(group: Group, store: private.Store) -> Any:
    """A connected NCCL backend for `group`. Raises RuntimeError when this torch has no NCCL."""
    if not dist.is_nccl_available():
        raise RuntimeError(
            f"group {group.name} asks for nccl, but this torch has none: use gloo, or a CUDA build of torch"
        )
    return private.nccl_backend(store, group.group_rank, group.ranks, group.name, group.options, group.timeout)


def build_native(group: Group, store: private.Store) -> Any:
    """An nccl2 backend for `group` that is still to be reconfigured. Raises RuntimeError when this torch has none."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        raise RuntimeError(
            f"group {group.name} asks for nccl2, but this torch has no NCCL or sees no GPU: use gloo, or a CUDA build "
            "of torch on a node with GPUs"
        )
    return reconfigure.nccl2_backend(store, group.group_rank, group.ranks, group.name, group.options, group.timeout)


def backend_in(backends: dict[str, tuple[Any, Any]]) -> Any:
    """The backend that runs NCCL's communicators among `backends` (device -> (type, backend)); None: there is none."""
    return next((backend for _, backend in backends.values() if private.is_nccl(backend)), None)


def abort(backends: list[Any]) -> int:
    """Abort the communicators of `backends`. Returns how many."""
    private.nccl_abort(backends)
    return len(backends)


def is_used() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()
