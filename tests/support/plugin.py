"""The SPANK plugin, built for the Slurm of this machine: once in a test run, in a folder that every user can read.

A cluster that loads it: `ClusterSpec(plugstack=(f"optional {build_plugin()} flashrec=/path/of/flashrec",), ...)`.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "slurm_plugin"


@functools.cache
def build_plugin(slurm_version: str = "") -> Path:
    """flashrecovery.so. `slurm_version`: pretend to be built for another release, for example "0x180b05" (24.11.5)."""
    folder = Path(tempfile.mkdtemp(prefix="flashrec-plugin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    make(f"BUILD={folder}", f"SLURM_VERSION_NUMBER={slurm_version}")
    return folder / "flashrecovery.so"


def make(*arguments: str, timeout_s: float = 280.0) -> str:
    """`make -C slurm_plugin …`; returns what it printed. A failure raises with all of it."""
    done = subprocess.run(
        ["make", "-C", str(SOURCES), *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"make {' '.join(arguments)}:\n{output}"
    return output
