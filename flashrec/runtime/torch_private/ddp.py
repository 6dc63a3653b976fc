"""The reducer of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_dist: Any = dist  # names that torch exports without saying so

BucketLayout = list[list[int]]


def layout(ddp: Any) -> BucketLayout:
    """Parameter indices of each gradient bucket, in reduction order. Allocates zeros of the size of all gradients."""
    index = {param.data_ptr(): i for i, param in enumerate(ddp._build_params_for_reducer()[0])}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [[index[param.data_ptr()] for param in bucket.parameters()] for bucket in buckets]


def impose(ddp: Any, layout: BucketLayout) -> None:
    """Re-create the reducer of `ddp` with this bucket layout; hooks that the user registered are registered again."""
    params, expects_sparse = ddp._build_params_for_reducer()
    original = _dist._compute_bucket_assignment_by_size
    _dist._compute_bucket_assignment_by_size = lambda *_a, **_k: (list(reversed(layout)), [2**60] * len(layout))
    try:
        ddp.reducer._remove_autograd_hooks()
        names = ddp._build_debug_param_to_name_mapping(params)
        ddp._ddp_init_helper(params, expects_sparse, names, ddp.static_graph)
    finally:
        _dist._compute_bucket_assignment_by_size = original
    for hook, state in ddp._comm_hooks:
        _dist._register_comm_hook(ddp.reducer, state, hook)


def reset(ddp: Any) -> None:
    """Forget a half-done backward; the next one records the order of gradients again, so buckets are rebuilt again."""
    ddp.reducer._reset_state()
    ddp._has_rebuilt_buckets = False


def rebuild(ddp: Any) -> bool:
    """Rebuild the buckets now if the reducer is due to (a broadcast from rank 0). True when the layout may be new."""
    if ddp._has_rebuilt_buckets or not ddp.reducer._rebuild_buckets():
        return False
    ddp._has_rebuilt_buckets = True
    return True


def is_rebuilt(ddp: Any) -> bool:
    return bool(ddp._has_rebuilt_buckets)


def has_comm_hooks(ddp: Any) -> bool:
    return bool(ddp._comm_hooks)
