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
from flashrec.runtime.mirrors.slots import Slot
from flashrec.runtime.state import State
from flashrec.runtime.torch_private import optim

_Pair = tuple[torch.Tensor, torch.Tensor]  # a place in the slot, and the tensor that belongs there
_GRAIN = 1 << 15  # elements; torch copies no fewer of them in several threads


class Copying:
    """One copy of a state. Made when a step begins: small things are copied then; `finish` does the rest."""

    def __init__(self, state: State, v: int, parts: dict[str, bytes], slot: Slot) -> None:
        """Raises CannotEncode."""
        self.v, self.slot = v, slot
        self.manifest, specs, tensors = state.describe(v, parts)
        places = slot.begin_with(specs)
        self._later = [(places.views[i], tensors[i]) for i in places.later]
        self._devices = {tensor.device for _, tensor in self._later if tensor.is_cuda}
        with torch.no_grad():
            _copy([(places.views[i], tensors[i]) for i in places.early])
        self._opened = {device: _event(device) for device in self._devices}

    def finish(self) -> None:
        """Return when everything is in the slot. From any thread."""
        with torch.no_grad():
            for device in self._devices:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(self._opened[device])
                with torch.cuda.stream(stream):
                    _copy([pair for pair in self._later if pair[1].device == device])
                stream.synchronize()
            _copy([pair for pair in self._later if not pair[1].is_cuda])
        self._later = []


def _event(device: torch.device) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _copy(pairs: list[_Pair]) -> None:
    """Large ones that lie in host memory one by one, in this thread alone; the others in one call. torch would have the
    threads of the training copy the large ones, too. Neither keeps the interpreter from running."""
    small: list[_Pair] = []
    for into, tensor in pairs:
        if tensor.device.type == "cpu" and tensor.numel() >= _GRAIN and tensor.is_contiguous():
            np.copyto(np.asarray(codec.tensor_bytes(into)), np.asarray(codec.tensor_bytes(tensor)))
        else:
            small.append((into, tensor))
    optim.foreach_copy(*map(list, zip(*small, strict=True)), non_blocking=True) if small else None
