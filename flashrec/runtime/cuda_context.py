"""A CUDA context for a process that is parked on a spare (`hot.cuda`), before it has a rank.

The driver and the context take seconds on some nodes. Neither the allocator nor a library's handle is made: what they
read from the environment is still the script's to set.
"""

from __future__ import annotations

import torch


def make(local_id: int) -> str:
    """Make a context on the GPU that the rank of this task will use: the only one that it sees, as with
    --gpus-per-task, else the one of its number. Never raises. Returns why there is none; '' if there is."""
    try:
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        count = torch.cuda.device_count()
        if count > 1 and local_id >= count:
            return f"task {local_id} of the node has no device of its own among {count}"
        with torch.cuda.device(local_id if count > 1 else 0):
            torch.cuda.synchronize()
    except Exception as err:
        return repr(err)
    return ""
