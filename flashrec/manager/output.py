"""The workers' output, copied into the job's output with the rank in front of each line.

Workers write straight into one file per rank and incarnation (no process in between can hold them up); this follower
reads those files. A line is shown when it is complete. The file of a former life is read on for a while, because last
words may come late over a shared filesystem; then what is left of its last line is shown, and it is forgotten.

Nothing here may hurt the job: files are read in a thread (the filesystem may hang), in pieces (a rank may have written
gigabytes, or one endless line), and when the job's output is full or closed the files per rank still have everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from pathlib import Path
from typing import TextIO

import msgspec

from flashrec.manager.output_files import OutputFiles

POLL_S = 0.2
MAX_LOOKS = 500  # files in one poll: opening one costs some 5 µs of the manager
LAST_WORDS_S = 60.0
_CHUNK = 256 * 1024
_MAX_LINE_BYTES = 64 * 1024
_STDOUT = 1
_Line = tuple[int, bytes]  # the rank, and what it wrote


class _Followed(msgspec.Struct):
    """quiet_polls: how often in a row there was nothing new."""

    rank: int
    path: Path
    prefix: str
    offset: int = 0
    partial: bytes = b""
    quiet_polls: int = 0


class OutputFollower:
    """follow: 'all', 'rank0' or 'none'. files: where to, if not to the job's output."""

    def __init__(
        self, directory: Path, follow: str, stream: TextIO | None = None, files: OutputFiles | None = None
    ) -> None:
        self._directory, self._follow = directory, follow
        self._stream, self._files = stream, files
        self._lock = threading.Lock()  # a cancelled `run` may leave a copy under way
        self._current: dict[int, _Followed] = {}
        self._former: list[_Followed] = []
        self._next = 0  # which file the next poll begins with, where there are very many

    def watch(self, rank: int, incarnation: int) -> None:
        """Follow the file of this worker from now on; its rank's former one is a former life."""
        if self._follow == "none" or (self._follow == "rank0" and rank != 0):
            return
        if rank in self._current:
            self._former.append(self._current[rank])
        prefix = f"[rank {rank}] " if incarnation == 1 else f"[rank {rank}.{incarnation}] "
        if self._files is not None and not self._files.is_labelled:
            prefix = ""
        self._current[rank] = _Followed(rank, self._directory / f"rank-{rank}.{incarnation}.log", prefix)

    @property
    def num_followed(self) -> int:
        """How many files are read at each poll."""
        return len(self._former) + len(self._current)

    async def run(self) -> None:
        """Copy until cancelled."""
        while True:
            await asyncio.to_thread(self.copy)
            await asyncio.sleep(POLL_S)

    def copy(self, final: bool = False) -> None:
        """Copy what has been written since the last call. final: everything, incomplete last lines as well."""
        with self._lock:
            while self._copy_some(is_all=final) and final:
                pass
            if final:
                self._show(_ends([*self._former, *self._current.values()]))

    def _copy_some(self, is_all: bool) -> bool:
        """One piece of each file, or of the next ones where there are very many. Returns whether there was anything
        new."""
        lines: list[_Line] = []
        former, followed = list(self._former), [*self._former, *self._current.values()]
        if len(followed) > MAX_LOOKS and not is_all:
            start = self._next % len(followed)
            self._next = start + MAX_LOOKS
            followed = (followed[start:] + followed[:start])[:MAX_LOOKS]
        is_new = sum(_take(one, lines) for one in followed) > 0
        over = [one for one in former if one.quiet_polls * POLL_S > LAST_WORDS_S]
        self._show(lines + _ends(over))
        for one in over:
            self._former.remove(one)
        return is_new

    def _show(self, lines: list[_Line]) -> None:
        if self._files is not None:
            self._store(self._files, lines)
            return
        data = b"".join(line + b"\n" for _, line in lines)
        with contextlib.suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.write(data.decode(errors="replace"))
                return
            while data:  # not through sys.stdout: what it cannot write it tries again at exit, and spoils the exit code
                data = data[os.write(_STDOUT, data) :]

    @staticmethod
    def _store(files: OutputFiles, lines: list[_Line]) -> None:
        for rank, of_rank in itertools.groupby(lines, key=lambda line: line[0]):
            with contextlib.suppress(OSError):
                files.write(rank, b"".join(line + b"\n" for _, line in of_rank))


def _take(followed: _Followed, lines: list[_Line]) -> bool:
    data = _read(followed.path, followed.offset)
    if not data:
        followed.quiet_polls += 1
        return False
    followed.offset += len(data)
    followed.quiet_polls = 0
    *whole, followed.partial = (followed.partial + data).split(b"\n")
    lines += [(followed.rank, followed.prefix.encode() + line) for line in whole]
    if len(followed.partial) > _MAX_LINE_BYTES:
        lines += _ends([followed])
    return True


def _read(path: Path, offset: int) -> bytes:
    """The next piece of a file from `offset` on; b'': nothing new, or it is not there yet. Opened each time (a shared
    filesystem shows what others have written to who opens a file), but without Python's buffers: nearly always there is
    nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        num_bytes = min(os.fstat(fd).st_size - offset, _CHUNK)
        return os.pread(fd, num_bytes, offset) if num_bytes > 0 else b""
    except OSError:
        return b""
    finally:
        os.close(fd)


def _ends(all_followed: list[_Followed]) -> list[_Line]:
    """The incomplete last lines, as they are."""
    lines = [(one.rank, one.prefix.encode() + one.partial) for one in all_followed if one.partial]
    for followed in all_followed:
        followed.partial = b""
    return lines
