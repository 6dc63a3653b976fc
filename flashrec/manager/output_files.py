"""srun's `-o PATTERN`: the followed output goes into files instead of the job's output.

One file for all ranks, or one for each with `%t` in the pattern. As with srun the lines are as the ranks wrote them;
with --label each has its rank in front. What one file gets is appended by one process, so lines of ranks never mix.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from flashrec.manager.request import OutputFile, RequestError

_FIELD = re.compile(r"%(\d{0,2})(.)?")
_REASONS = {
    "n": "ranks move between nodes: use %t, the rank", "N": "ranks move between nodes: use %t, the rank",
    "s": "a rank may have several job steps", "J": "a rank may have several job steps: use %j, the job",
}  # fmt: skip


class OutputFiles:
    """Opens what is written to, once each; truncates what was there before unless it is to be appended to."""

    def __init__(self, wanted: OutputFile, environ: Mapping[str, str]) -> None:
        self._wanted = wanted
        self._environ = dict(environ)
        self._fds: dict[Path, int] = {}
        self.path(0)

    @property
    def is_labelled(self) -> bool:
        return self._wanted.is_labelled

    def path(self, rank: int) -> Path:
        """The file of a rank. Raises RequestError for a pattern that cannot be used."""
        text = _FIELD.sub(lambda found: self._field(found, rank), self._wanted.pattern)
        if not text:
            raise RequestError("srun option --output needs a file")
        return Path.cwd() / text

    def open_all(self, num_ranks: int) -> None:
        """Make the files before anything starts. Raises RequestError if one cannot be written."""
        for path in sorted({self.path(rank) for rank in range(num_ranks)}):
            try:
                self._open(path)
            except OSError as err:
                raise RequestError(f"srun option --output: cannot write {path}: {err.strerror}") from err

    def write(self, rank: int, data: bytes) -> None:
        """Append to the file of a rank. Raises OSError."""
        fd = self._open(self.path(rank))
        while data:
            data = data[os.write(fd, data) :]

    def close(self) -> None:
        """Harmless if called again."""
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.popitem()[1])

    def _open(self, path: Path) -> int:
        if path not in self._fds:
            how = os.O_APPEND if self._wanted.is_appended else os.O_APPEND | os.O_TRUNC
            self._fds[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o666)
        return self._fds[path]

    def _field(self, found: re.Match[str], rank: int) -> str:
        width, letter = int(found[1] or 0), found[2] or ""
        job_id = self._environ.get("SLURM_JOB_ID", "0")
        values = {
            "j": job_id, "t": str(rank), "u": self._environ.get("USER", ""),
            "x": self._environ.get("SLURM_JOB_NAME", ""), "a": self._environ.get("SLURM_ARRAY_TASK_ID", "4294967294"),
            "A": self._environ.get("SLURM_ARRAY_JOB_ID", job_id), "%": "%",
        }  # fmt: skip
        if letter not in values:
            reason = _REASONS.get(letter, "known are %j %A %a %x %u %t %%")
            raise RequestError(f"srun option --output={self._wanted.pattern}: %{letter} cannot be used: {reason}")
        value = values[letter].replace("/", "_") if letter in "xu" else values[letter]
        return value.zfill(width) if letter in "jtaA" else value


def output_file(
    pattern: str | None, open_mode: str | None, *, is_labelled: bool
) -> tuple[OutputFile | None, str | None]:
    """What `-o PATTERN` means: a file, or another value of output.follow ('all', 'none'). Raises RequestError."""
    if pattern is None:
        return None, None
    if pattern in ("all", "none"):
        return None, pattern
    if pattern.isdigit():
        raise RequestError(
            f"srun option --output={pattern}: the output of one rank cannot be chosen; use --set output.follow=rank0"
        )
    return OutputFile(pattern, open_mode == "append", is_labelled), None
