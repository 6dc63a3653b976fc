"""From the live state into a slot, while forward and backward run.

Nothing changes parameters and optimizer state between the start of a step and its vote (`untouched` looks after that),
so a thread may copy them meanwhile. What a forward does change is copied before it begins: buffers, and tensors of
registered objects that are small enough to be put back (`snapshot`). What is no tensor is in the manifest.

On CUDA the copies go into pinned memory on a stream of their own, behind what was queued when the step began. This
has not run on hardware yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flashrec.runtime import codec
from flashrec.runtime.mirrors.slots import Slot, layout, views
from flashrec.runtime.snapshot import MAX_SNAPSHOT_BYTES
from flashrec.runtime.state import State, TensorSpec


class Copying:
    """One copy of a state. Made when a step begins: small things are copied then; `finish` does the rest."""

    def __init__(self, state: State, v: int, parts: dict[str, bytes], slot: Slot) -> None:
        """Raises CannotEncode."""
        self.v, self.slot = v, slot
        self.manifest = state.manifest(v, parts)
        tensors, specs = state.tensors(), self.manifest.specs()
        slot.begin(layout(specs)[1])
        pairs = list(zip(views(slot.buffer, specs), tensors, strict=True))
        is_early = [_is_changed_by_forward(spec) for spec in specs]
        self._later = [pair for pair, early in zip(pairs, is_early, strict=True) if not early]
        self._devices = {tensor.device for _, tensor in pairs if tensor.device.type == "cuda"}
        with torch.no_grad():
            for pair, early in zip(pairs, is_early, strict=True):
                if early:
                    _copy(*pair)
        self._opened = {device: _event(device) for device in self._devices}

    def finish(self) -> None:
        """Return when everything is in the slot. From any thread."""
        with torch.no_grad():
            for device in self._devices:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(self._opened[device])
                with torch.cuda.stream(stream):
                    for into, tensor in self._later:
                        if tensor.device == device:
                            _copy(into, tensor)
                stream.synchronize()
            for into, tensor in self._later:
                if tensor.device not in self._devices:
                    _copy(into, tensor)
        self._later = []


def _is_changed_by_forward(spec: TensorSpec) -> bool:
    return spec.name.startswith("buffer ") or (spec.name.startswith("aside ") and spec.num_bytes <= MAX_SNAPSHOT_BYTES)


def _event(device: torch.device) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _copy(into: torch.Tensor, tensor: torch.Tensor) -> None:
    if not into.numel():
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        np.copyto(into.numpy(), np.asarray(codec.tensor_bytes(tensor)))  # without the interpreter's lock
    else:
        into.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
