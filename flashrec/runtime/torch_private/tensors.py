"""Tensors as autograd sees them."""

from __future__ import annotations

import torch


def version(tensor: torch.Tensor) -> int:
    """A number that grows with each change in place, through this tensor or one that shares its counter (`detach`)."""
    return int(tensor._version)
