"""FSDP2 (`fully_shard`, and `replicate`, which is built on it): what a module keeps between the hooks of one step.

A state belongs to one `fully_shard` call; it has groups of parameters that are gathered and reduced together. All
states of one model share a context, which is found in the first forward ("lazy init", without communication).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from flashrec.runtime.torch_private import versions

Flags = tuple[bool, ...]
_GROUP_FLAGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "unshard_in_backward")
_NEEDED_OF_STATE = ("_fsdp_param_groups", "_is_root", "_state_ctx", "_modules", "_device", "_reset_iter_state")
_NEEDED_OF_GROUP = ("fsdp_params", "_all_gather_result", "_to_sharded", "_partial_reduce_output", *_GROUP_FLAGS)
_NEEDED_OF_PARAM = ("unsharded_accumulated_grad", "grad_offload_event", "sharded_param")


def states(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """(module name, state) of every `fully_shard` in `model`, in module order. Raises UnsupportedTorch."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.setdefault(id(state), (name, state))  # fully_shard([a, b]) makes one of two modules
    for _, state in found.values():
        versions.require(needed(state))
    return list(found.values())


def needed(state: Any) -> Iterator[tuple[str, Any]]:
    """Each private name, and the object that must have it. The names are set on objects, not on classes."""
    for name in _NEEDED_OF_STATE:
        yield name, state
    yield "is_last_backward", getattr(state, "_state_ctx", None)
    for group in getattr(state, "_fsdp_param_groups", ()):
        for name in _NEEDED_OF_GROUP:
            yield name, group
        for param in getattr(group, "fsdp_params", ()):
            for name in _NEEDED_OF_PARAM:
                yield name, param


def settle(states: list[Any]) -> None:
    """As before a forward: sharded, nothing gathered or half reduced, no gradient of a micro-batch. No communication.

    `_reset_iter_state` is torch's own for an exception in a step. It forgets gradients that autograd has already put
    on gathered parameters (they would be added to those of the next step), and waits for gathers that were cut.
    """
    groups = [group for state in states for group in state._fsdp_param_groups]
    for group in groups:
        _drop_gather(group)
    for state in states:
        if state._is_root:
            state._reset_iter_state()
    for group in groups:
        group._to_sharded()  # also where no forward has been yet, or only one of an inner module
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = param.grad_offload_event = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def device(state: Any) -> torch.device:
    """Where it computes and communicates; parameters may be kept elsewhere."""
    found: torch.device = state._device
    return found


def flags(state: Any) -> Flags:
    """What scripts switch between micro-batches, of the context and of each group."""
    of_groups = (bool(getattr(group, name)) for group in state._fsdp_param_groups for name in _GROUP_FLAGS)
    return bool(state._state_ctx.is_last_backward), *of_groups


def set_flags(state: Any, wanted: Flags) -> None:
    state._state_ctx.is_last_backward, values = wanted[0], iter(wanted[1:])
    for group in state._fsdp_param_groups:
        for name in _GROUP_FLAGS:
            setattr(group, name, next(values))


def _drop_gather(group: Any) -> None:
    """Forget a gather that was begun ahead of its use: one that was cut raises when it is waited for."""
    gathered = group._all_gather_result
    if gathered is None:
        return
    if gathered.all_gather_event is not None:
        group.device_handle.current_stream().wait_event(gathered.all_gather_event)
    if gathered.all_gather_work is not None:
        with contextlib.suppress(RuntimeError):
            gathered.all_gather_work.wait()
    group._all_gather_result = None
