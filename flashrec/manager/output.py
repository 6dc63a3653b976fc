"""The workers' output, copied into the job's output with the rank in front of each line.

Workers write straight into one file per rank and incarnation (no process in between can hold them up); this follower
reads those files. A line is shown when it is complete; what a dead worker wrote last is shown at the end.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TextIO

POLL_S = 0.2
_CHUNK = 256 * 1024


class OutputFollower:
    """follow: 'all', 'rank0' or 'none'."""

    def __init__(self, directory: Path, follow: str, stream: TextIO | None = None) -> None:
        self._directory, self._follow = directory, follow
        self._stream = stream or sys.stdout
        self._offsets: dict[Path, int] = {}
        self._partial: dict[Path, bytes] = {}
        self._watched: dict[Path, str] = {}

    def watch(self, rank: int, incarnation: int) -> None:
        """Follow the file of one worker from now on."""
        if self._follow == "none" or (self._follow == "rank0" and rank != 0):
            return
        path = self._directory / f"rank-{rank}.{incarnation}.log"
        self._watched[path] = f"[rank {rank}] " if incarnation == 1 else f"[rank {rank}.{incarnation}] "

    async def run(self) -> None:
        """Copy until cancelled."""
        while True:
            self.copy()
            await asyncio.sleep(POLL_S)

    def copy(self, final: bool = False) -> None:
        """Copy what has been written since the last call. final: incomplete last lines as well."""
        lines: list[str] = []
        for path, prefix in self._watched.items():
            for line in self._new_lines(path, final):
                lines.append(prefix + line.decode(errors="replace"))
        if lines:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()

    def _new_lines(self, path: Path, final: bool) -> list[bytes]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read(_CHUNK if not final else -1)
        except OSError:
            return []  # not there yet
        self._offsets[path] = self._offsets.get(path, 0) + len(data)
        *whole, rest = (self._partial.get(path, b"") + data).split(b"\n")
        self._partial[path] = b"" if final else rest
        return [*whole, rest] if final and rest else whole
