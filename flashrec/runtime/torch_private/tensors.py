"""Tensors as autograd and DTensor see them."""

from __future__ import annotations

from typing import Any

import torch


def version(tensor: torch.Tensor) -> int:
    """A number that grows with each change in place, through this tensor or one that shares its counter (`detach`)."""
    return int(tensor._version)


def local_of(dtensor: Any) -> torch.Tensor:
    """`to_local()` of what needs no gradient. Of a parameter that makes a view and a Python object for it in every call,
    which takes seven times as long. Raises AttributeError where torch calls it otherwise."""
    found: torch.Tensor = dtensor._local_tensor
    return found
