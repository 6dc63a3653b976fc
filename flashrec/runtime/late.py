"""What a script sets in its environment too late for a parked process, which has imported torch before the script.

A first life starts the ordinary way, so it is asked there: variables that the script itself has set or changed, of
those that torch and its libraries read when they are loaded. Were they ignored in a replacement, it could compute with
another number of threads, and other bits. Then nothing is parked, and that is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_READ_WHEN_LOADED = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|DNNL|ONEDNN|ATEN)_\w+|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|PYTORCH_(\w+_)?ALLOC_CONF"
)
_HARMLESS = ("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK")  # libraries set these when they are imported
_AT_START = Path("/proc/self/environ")


def objection(environ: Mapping[str, str], at_start: Path = _AT_START) -> str:
    """Why replacements of this process cannot be parked; '' if they can, or if its first environment cannot be read."""
    try:
        before = dict(item.split("=", 1) for item in at_start.read_bytes().decode(errors="replace").split("\0") if item)
    except (OSError, ValueError):
        return ""
    names = [name for name in environ if _READ_WHEN_LOADED.fullmatch(name) and name not in _HARMLESS]
    late = sorted(name for name in names if environ[name] != before.get(name))
    if not late:
        return ""
    return f"the script sets {', '.join(late)}, which a parked process reads before: set it in front of the command"
