"""A memory limit for one process, so that the kernel's OOM killer ends it and nothing else: a cgroup of our own.

Version 1 and 2 of cgroups are known. Where neither can be used, `MemoryGroup.find` says why.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from types import TracebackType


class NoMemoryGroup(RuntimeError):
    """No cgroup for us; the text says why."""


class MemoryGroup:
    """A cgroup with a limit of `limit_bytes` beyond what its processes had when they came. A context manager."""

    def __init__(self, folder: Path, version: int, limit_bytes: int) -> None:
        self._folder, self._version, self._limit_bytes = folder, version, limit_bytes

    @classmethod
    def find(cls, limit_bytes: int) -> MemoryGroup:
        """One below our own group; raises NoMemoryGroup."""
        name = f"flashrec-bench-{os.getpid()}"
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        for _, mount, kind, options, *_ in mounts:
            if kind == "cgroup" and "memory" in options.split(","):
                folders = [Path(mount) / own.get("memory", "/").lstrip("/"), Path(mount)]
                return cls(next(folder for folder in folders if folder.is_dir()) / name, 1, limit_bytes)
        for _, mount, kind, *_ in mounts:
            controllers = Path(mount) / "cgroup.subtree_control"
            if kind == "cgroup2" and controllers.exists() and "memory" in controllers.read_text().split():
                return cls(Path(mount) / name, 2, limit_bytes)
        raise NoMemoryGroup("this machine offers no memory cgroup")

    def __enter__(self) -> MemoryGroup:
        try:
            self._folder.mkdir()
            self._write("memory.limit_in_bytes" if self._version == 1 else "memory.max", str(self._limit_bytes))
        except OSError as error:
            raise NoMemoryGroup(f"{self._folder}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(100):  # a killed process leaves its group a little later
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.05)

    def take(self, pid: int) -> None:
        """From now on the process's new memory is counted here; what it has already is not."""
        self._write("cgroup.procs", str(pid))

    def num_killed(self) -> int:
        """How many processes the kernel has killed for want of memory here."""
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        found = re.search(r"^oom_kill (\d+)$", (self._folder / name).read_text(), re.MULTILINE)
        if found is None:
            raise NoMemoryGroup(f"{self._folder / name} does not count kills")
        return int(found[1])

    def _write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)
