"""Which uses of DDP can be recovered bit by bit. The others are refused when the session is created, with reasons."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from flashrec.runtime.snapshot import MAX_SNAPSHOT_BYTES, Stateful, num_bytes
from flashrec.runtime.timeline import logger
from flashrec.runtime.torch_private import ddp as private
from flashrec.runtime.torch_private import versions

_IN_BACKWARD = (
    "an optimizer that steps inside of the backward has changed parameters before all ranks have voted for the step, "
    "and that cannot be undone; call optimizer.step() after the backward"
)


def refuse(ddp: Any) -> None:
    """Raises NotImplementedError that says what cannot be recovered, why, and what to do; UnsupportedTorch."""
    if ddp.mixed_precision is not None:
        raise NotImplementedError(
            "DistributedDataParallel(mixed_precision=…) cannot be recovered: between forward and backward the "
            "parameters are copies in low precision, and a step that is cut leaves them; use autocast"
        )
    if private.has_delayed_params(ddp):
        raise NotImplementedError(
            "DistributedDataParallel(delay_all_reduce_named_params=…) cannot be recovered: torch does not wait for "
            "their all-reduce, so nobody knows when all gradients are there; leave it off"
        )
    versions.require(private.needed(ddp))
    if private.is_compiled_reducer(ddp):
        raise NotImplementedError(
            "torch._dynamo.config.optimize_ddp = 'python_reducer' cannot be recovered; use the default"
        )
    if private.has_optimizer_in_backward(ddp):
        raise NotImplementedError(f"this DDP cannot be recovered: {_IN_BACKWARD}")
    if ddp.static_graph and private.expects_sparse(ddp):
        raise NotImplementedError(
            "DistributedDataParallel(static_graph=True) with sparse gradients cannot be recovered; leave either off"
        )
    for hook, state in private.comm_hooks(ddp):
        _refuse_hook(hook, state)
    if hasattr(ddp, "buffer_hook"):
        logger.warning("a buffer hook of DDP is registered: the buffers of a rank that is lost are those of its source")
    elif not ddp.forward_sync_buffers and any(True for _ in ddp.module.buffers()):
        logger.warning(
            "DDP does not share buffers (forward_sync_buffers or broadcast_buffers is False): the replacement of a "
            "lost rank takes those of its source, which may not be what they were on the lost one"
        )


def hook_states(ddp: Any) -> list[Stateful]:
    """States of its communication hooks that can be kept and sent."""
    return [state for _, state in private.comm_hooks(ddp) if _is_stateful(state)]


def _is_stateful(state: Any) -> bool:
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


def _refuse_hook(hook: Any, state: Any) -> None:
    name, kind = getattr(hook, "__qualname__", str(hook)), type(state).__name__
    if "optimizer_overlap" in getattr(hook, "__module__", ""):
        raise NotImplementedError(f"the communication hook {name} cannot be recovered: {_IN_BACKWARD}")
    if state is None or isinstance(state, dist.ProcessGroup):
        return
    if not _is_stateful(state):
        raise NotImplementedError(
            f"the state of the communication hook {name} is a {kind}, which cannot be recovered: a step that is done "
            "again would find it changed, and the replacement of a lost rank without it. (Of PowerSGD, the error that "
            "each rank feeds back is lost with the rank.) If it is the same on all ranks, give it state_dict() and "
            "load_state_dict(); they may return and take {} if it never changes"
        )
    size = num_bytes(state.state_dict())
    if size > MAX_SNAPSHOT_BYTES:
        raise NotImplementedError(
            f"the state of the communication hook {name} holds {size} bytes of tensors; up to {MAX_SNAPSHOT_BYTES} are "
            "put back when a step is done again"
        )
