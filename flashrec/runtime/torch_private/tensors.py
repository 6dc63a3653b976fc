"""Tensors as autograd and DTensor see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def version(tensor: torch.Tensor) -> int:
    """A number that grows with each change in place, through this tensor or one that shares its counter (`detach`)."""
    return int(tensor._version)


def local_of(dtensor: Any) -> torch.Tensor:
    """`to_local()` of what needs no gradient, in a seventh of the time: that makes a view and a Python object for each
    parameter. Raises AttributeError where torch calls it otherwise."""
    found: torch.Tensor = dtensor._local_tensor
    return found


def split_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the elements of `flat`, one for each tensor and of its shape, in row-major order; in one call."""
    return list(torch._utils._unflatten_dense_tensors(flat, tensors))  # type: ignore[no-untyped-call]
