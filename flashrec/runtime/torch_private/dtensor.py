"""Random numbers of DTensor.

On a GPU the first random operation on a DTensor creates a tracker, and that broadcasts the generator of rank 0 to all
ranks. A replacement would do so in a step in which nobody else does. The tracker keeps no numbers of its own: its state
is the generator of the device, which is seeded, kept and sent like any other.
"""

from __future__ import annotations

from typing import Any

import torch

from flashrec.runtime import shards
from flashrec.runtime.torch_private import versions


def make_random_tracker(model: torch.nn.Module) -> None:
    """Create the tracker now, without a broadcast, where DTensors of `model` will want one. Raises UnsupportedTorch."""
    meshes: list[Any] = [param.device_mesh for param in model.parameters() if shards.is_dtensor(param)]  # type: ignore[attr-defined]
    if not meshes or meshes[0].device_type == "cpu":
        return
    from torch.distributed.tensor import _random

    names = ("_rng_tracker", "OffsetBasedRNGTracker", "is_rng_supported_mesh")
    versions.require((name, _random) for name in names)
    if _random._rng_tracker is None and _random.is_rng_supported_mesh(meshes[0]):
        _random._rng_tracker = _random.OffsetBasedRNGTracker(meshes[0], run_state_sync=False)
