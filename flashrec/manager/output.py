"""The workers' output, copied into the job's output with the rank in front of each line.

Workers write straight into one file per rank and incarnation (no process in between can hold them up); this follower
reads those files. A line is shown when it is complete. The file of a former life is read on for a while, because last
words may come late over a shared filesystem; then what is left of its last line is shown, and it is forgotten.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TextIO

import msgspec

POLL_S = 0.2
LAST_WORDS_S = 60.0
_CHUNK = 256 * 1024


class _Followed(msgspec.Struct):
    """quiet_polls: how often in a row there was nothing new."""

    path: Path
    prefix: str
    offset: int = 0
    partial: bytes = b""
    quiet_polls: int = 0


class OutputFollower:
    """follow: 'all', 'rank0' or 'none'."""

    def __init__(self, directory: Path, follow: str, stream: TextIO | None = None) -> None:
        self._directory, self._follow = directory, follow
        self._stream = stream or sys.stdout
        self._current: dict[int, _Followed] = {}
        self._former: list[_Followed] = []

    def watch(self, rank: int, incarnation: int) -> None:
        """Follow the file of this worker from now on; its rank's former one is a former life."""
        if self._follow == "none" or (self._follow == "rank0" and rank != 0):
            return
        if rank in self._current:
            self._former.append(self._current[rank])
        prefix = f"[rank {rank}] " if incarnation == 1 else f"[rank {rank}.{incarnation}] "
        self._current[rank] = _Followed(self._directory / f"rank-{rank}.{incarnation}.log", prefix)

    @property
    def num_followed(self) -> int:
        """How many files are read at each poll."""
        return len(self._former) + len(self._current)

    async def run(self) -> None:
        """Copy until cancelled."""
        while True:
            self.copy()
            await asyncio.sleep(POLL_S)

    def copy(self, final: bool = False) -> None:
        """Copy what has been written since the last call. final: incomplete last lines as well."""
        lines: list[str] = []
        for followed in self._former:
            self._take(followed, lines, final or followed.quiet_polls * POLL_S >= LAST_WORDS_S)
        self._former = [followed for followed in self._former if followed.quiet_polls * POLL_S <= LAST_WORDS_S]
        for followed in self._current.values():
            self._take(followed, lines, final)
        if lines:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()

    @staticmethod
    def _take(followed: _Followed, lines: list[str], final: bool) -> None:
        try:
            with followed.path.open("rb") as file:
                file.seek(followed.offset)
                data = file.read(_CHUNK if not final else -1)
        except OSError:
            data = b""  # not there yet
        followed.offset += len(data)
        followed.quiet_polls = 0 if data else followed.quiet_polls + 1
        *whole, rest = (followed.partial + data).split(b"\n")
        followed.partial = b"" if final else rest
        lines += [
            followed.prefix + line.decode(errors="replace") for line in ([*whole, rest] if final and rest else whole)
        ]
