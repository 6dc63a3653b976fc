"""FlashRecovery for Slurm: a distributed PyTorch job goes on within seconds after losing a process or a node.

`import flashrec` is cheap: it imports neither torch nor mpi4py. A training script uses two names, `flashrec.init()`
before its own `dist.init_process_group(...)` and `flashrec.Session(...)`; both load the torch runtime on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashrec.runtime.api import Session, init

__version__ = "0.1.0"
__all__ = ["Session", "__version__", "init"]


def __getattr__(name: str) -> Any:
    if name in ("init", "Session"):
        from flashrec.runtime import api

        return getattr(api, name)
    raise AttributeError(f"module 'flashrec' has no attribute {name!r}")
