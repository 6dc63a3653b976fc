"""A PATH with our own programs in front: shell scripts that answer as Slurm's commands, or do not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

SLURM = ("sinfo", "squeue", "scontrol", "srun", "munge", "unmunge")


class FakeCommands:
    """`programs`: name to the text of a shell script. Slurm's other programs are not found."""

    def __init__(self, programs: Mapping[str, str]) -> None:
        self._programs = programs

    def __enter__(self) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="flashrec-fakes-")
        folder = Path(self._folder.name)
        for name in ("sh", "env", "cat", "sleep"):
            found = next(Path(place) / name for place in ("/bin", "/usr/bin") if (Path(place) / name).exists())
            (folder / name).symlink_to(found)
        for name, script in self._programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        self._before = os.environ["PATH"]
        os.environ["PATH"] = str(folder)
        return folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.environ["PATH"] = self._before
        self._folder.cleanup()
