"""Optimizers and what stands beside them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any

import torch

_torch_c: Any = torch._C


def forget_scaler_stage(scaler: Any) -> None:
    """Let a GradScaler unscale again in this step: its state_dict does not hold which optimizers it has unscaled."""
    with contextlib.suppress(ImportError):
        from torch.amp.grad_scaler import _refresh_per_optimizer_state

        scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


def foreach_copy(into: list[torch.Tensor], values: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy many small tensors with few calls. non_blocking: as in `Tensor.copy_`."""
    if into:
        torch._foreach_copy_(into, values, non_blocking)


def is_in_backward() -> bool:
    """True in a hook that autograd calls, on the thread on which backward() was called."""
    return int(_torch_c._current_graph_task_id()) >= 0
