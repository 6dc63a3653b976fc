"""Which torch we run on: the range, and a self-test that names what is missing.

It also replaces the backend of a throw-away group, so that an ABI that only looks right is found before training and
not in the first recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from flashrec.runtime.errors import UnsupportedTorch
from flashrec.runtime.torch_private.groups import Replacer, fake_backend, fake_class, find_release

_c10d: Any = torch._C._distributed_c10d

SUPPORTED = ((2, 13), (2, 15))
SUPPORTED_TEXT = ">=2.13,<2.15"
RECONFIGURES = (2, 14)  # first release whose backends can be connected anew, see `reconfigure`


def self_test() -> bool:
    """Check that this torch has what we need. Returns True when `release` works. Raises UnsupportedTorch."""
    if not SUPPORTED[0] <= current() < SUPPORTED[1]:
        raise UnsupportedTorch(
            f"torch {torch.__version__} is not supported by this flashrec; install torch {SUPPORTED_TEXT}"
        )
    require(_needed())
    for release in (find_release(), None):
        if _can_replace(release):
            return release is not None
    raise UnsupportedTorch(
        f"torch {torch.__version__}: the backend of a process group cannot be replaced in place; "
        f"this flashrec supports torch {SUPPORTED_TEXT}"
    )


def current() -> tuple[int, ...]:
    """(2, 14) for torch 2.14.1+cpu."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def require(needed: Iterable[tuple[str, Any]]) -> None:
    """`needed`: (private name, its owner). Raises UnsupportedTorch that names all that are missing."""
    missing = [name for name, owner in needed if not _has(owner, name)]
    if missing:
        raise UnsupportedTorch(
            f"torch {torch.__version__} lacks {', '.join(missing)}; this flashrec supports torch {SUPPORTED_TEXT}"
        )


def _needed() -> Iterator[tuple[str, Any]]:
    for name in ("_new_process_group_helper", "_world", "BackendConfig", "rendezvous"):
        yield name, c10d
    for name in (
        "_register_backend",
        "_get_backend",
        "_set_default_backend",
        "_set_group_name",
        "_set_group_desc",
        "_id",
        "_get_sequence_number_for_group",
    ):
        yield name, dist.ProcessGroup
    for name in ("_get_zeros_like_grad_buckets", "_reset_state", "_rebuild_buckets", "_remove_autograd_hooks"):
        yield name, _c10d.Reducer
    for name in ("_ddp_init_helper", "_build_params_for_reducer", "_build_debug_param_to_name_mapping"):
        yield name, torch.nn.parallel.DistributedDataParallel
    yield "_compute_bucket_assignment_by_size", dist
    yield "_create_internal", fake_class()
    yield "_Options", getattr(dist, "ProcessGroupGloo", None)
    yield "_foreach_copy_", torch
    yield "_current_graph_task_id", torch._C


def _has(owner: Any, name: str) -> bool:
    return hasattr(owner, name)


def _can_replace(release: Callable[[int], None] | None) -> bool:
    group = dist.ProcessGroup(_c10d.HashStore(), 0, 1)
    cpu = torch.device("cpu")
    group._register_backend(cpu, dist.ProcessGroup.BackendType.CUSTOM, fake_backend(0, 1))
    replacer, backend = Replacer(release), None
    try:
        for _ in range(2):  # the first takes the place of a shadow, the second that of a true backend
            backend = fake_backend(0, 1)
            replacer.replace(group, {cpu: (dist.ProcessGroup.BackendType.GLOO, backend)}, "self-test", "")
    except (RuntimeError, ValueError):
        return False
    return group._get_backend(cpu) is backend
