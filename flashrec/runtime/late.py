"""What a script sets in its environment too late for a parked process, which has imported torch before the script.

A first life starts the ordinary way, so it is asked there: variables that the script itself has set or changed, of
those that torch and its libraries read when they are loaded. Were they ignored in a replacement, it could compute with
another number of threads, and other bits. Then nothing is parked, and that is said. The same goes for what the driver
reads when a CUDA context is made, where parked processes have one (`hot.cuda`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_READ_WHEN_LOADED = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|DNNL|ONEDNN|ATEN)_\w+|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|PYTORCH_(\w+_)?ALLOC_CONF"
)
_READ_WITH_CUDA = re.compile(r"CUDA_\w+|NVIDIA_TF32_OVERRIDE")
_HARMLESS = ("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "CUDA_MODULE_LOADING")  # libraries and torch set these
_AT_START = Path("/proc/self/environ")


def objection(environ: Mapping[str, str], at_start: Path = _AT_START) -> str:
    """Why replacements of this process cannot be parked; '' if they can, or if its first environment cannot be read."""
    return _said(environ, at_start, _READ_WHEN_LOADED, "a parked process")


def cuda_objection(environ: Mapping[str, str], at_start: Path = _AT_START) -> str:
    """Why they cannot have a CUDA context while parked; as `objection`."""
    return _said(environ, at_start, _READ_WITH_CUDA, "a parked process with a CUDA context")


def _said(environ: Mapping[str, str], at_start: Path, read: re.Pattern[str], who: str) -> str:
    try:
        before = dict(item.split("=", 1) for item in at_start.read_bytes().decode(errors="replace").split("\0") if item)
    except (OSError, ValueError):
        return ""
    names = [name for name in environ if read.fullmatch(name) and name not in _HARMLESS]
    late = sorted(name for name in names if environ[name] != before.get(name))
    if not late:
        return ""
    return f"the script sets {', '.join(late)}, which {who} reads before: set it in front of the command"
