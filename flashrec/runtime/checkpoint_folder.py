"""The folder in which a job keeps its checkpoints: what is complete, what is a draft, what may go.

    FOLDER/step-00000100/        complete: what the script's hook wrote, and about.json
    FOLDER/.draft-…/             being written; of no use to anybody once a failure has come
    FOLDER/.old-…/               being deleted

A checkpoint gets its name when all of it is there, by one rename, and loses it by another one before it is deleted. So
whatever has the name is whole. Needs a filesystem that all ranks share.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
from pathlib import Path

ABOUT = "about.json"
_COMPLETE = re.compile(r"step-(\d{8,})")


class CheckpointFolder:
    """keep: how many complete ones stay."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path.absolute(), keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        found = [(match, path) for path in self.path.iterdir() if (match := _COMPLETE.fullmatch(path.name))]
        return sorted(int(match[1]) for match, path in found if (path / ABOUT).is_file())

    def of(self, step: int) -> Path:
        """Where the complete checkpoint of `step` is, or will be."""
        return self.path / f"step-{step:08d}"

    def has(self, step: int) -> bool:
        return (self.of(step) / ABOUT).is_file()

    def about(self, step: int) -> dict[str, object]:
        """What is written beside a complete checkpoint: step, world_size, ranks that wrote it, when."""
        found: dict[str, object] = json.loads((self.of(step) / ABOUT).read_text())
        return found

    def draft(self, step: int, token: int) -> Path:
        """An empty folder to be filled by all ranks that agree on `token`."""
        path = self.path / f".draft-{step:08d}-{token:016x}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def put_in_place(self, draft: Path, step: int, about: dict[str, object]) -> None:
        """The draft is whole: give it its name. Raises OSError."""
        written = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        (draft / ABOUT).write_text(json.dumps({"step": step, **about, "written": written}) + "\n")
        for path in draft.rglob("*"):
            _sync(path)
        _sync(draft)
        draft.rename(self.of(step))
        _sync(self.path)

    def tidy(self) -> None:
        """Delete all but the newest complete ones, and drafts that nobody goes on with. What resists stays."""
        for step in self.steps()[: -self._keep]:
            with contextlib.suppress(OSError):
                self.of(step).rename(self.path / f".old-{step:08d}")
        for path in [*self.path.glob(".draft-*"), *self.path.glob(".old-*")]:
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
