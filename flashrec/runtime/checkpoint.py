"""Checkpoints through the script's own hooks: the rung below all replicas, and what the next job starts from.

    save(folder, group)   writes the state of the ranks of `group` (None: all) into `folder`
    load(folder)          reads it back, on every rank

All ranks save between two steps, before the block of a step that is a multiple of `every`: there they agree in a
collective that it is needed, which a failure ends like any other; what was begun is then a draft that nobody goes on
with, and all ranks come to the same point again in the next generation. When every rank has written its part, one of
them asks for permission (`permit`) and gives the draft its name.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashrec.runtime.checkpoint_folder import CheckpointFolder
from flashrec.runtime.stretches import Stretches
from flashrec.runtime.timeline import logger

Group = Any  # dist.ProcessGroup; None: all ranks
Save = Callable[[Path, Group], object]
Load = Callable[[Path], object]
_MOST = 64  # complete checkpoints that ranks compare


class Checkpoints:
    """The hooks of one session. may_commit: `Session.may_commit`; kept(step, how, took_s): one is complete."""

    def __init__(self, folder: CheckpointFolder, save: Save, load: Load, every: int) -> None:
        self._folder, self._save, self._load, self._every = folder, save, load, every
        self.may_commit: Callable[[int], bool] = lambda step: True
        self.kept: Callable[[int, str, float], None] = lambda step, how, took_s: None
        self.stretches: Stretches | None = None

    def load_newest(self) -> int | None:
        """Load the newest checkpoint that is complete, on all ranks alike, and return its step; None: there is none."""
        step = self._newest()
        if step is None:
            self._tell(-1, "found", 0.0)
            return None
        start, path = time.monotonic(), self._folder.of(step)
        try:
            self._load(path)
        except Exception as err:
            err.add_note(f"while loading the checkpoint {path}; remove it to go on from the one before it")
            raise
        took_s = time.monotonic() - start
        logger.info("loaded the checkpoint of step %d from %s in %.1f s", step, path, took_s)
        if self.stretches is not None:
            self.stretches.of_checkpoint(step, _size(), self._folder.about(step))
        self._tell(step, "found", took_s)
        return step

    def is_due(self, step: int) -> bool:
        """All ranks save before the block of `step`."""
        return step > 0 and step % self._every == 0

    def keep(self, step: int, how: str = "saved", group: Group = None) -> None:
        """Save the state of `step`, together with all ranks of `group`. Raises what the hook raises, and what a
        collective does that is cut; nothing of the state has changed then."""
        token = secrets.randbits(62) if _rank(group) == 0 else 0
        missing, token = _sum([0 if self._folder.has(step) else 1, token], group)
        if not missing:  # it was completed before the failure after which all ranks came here again
            if group is not None and _rank(group) == 0:
                self.kept(step, how, 0.0)
            return
        start, draft = time.monotonic(), self._folder.draft(step, token)
        self._save(draft, group)
        _sum([], group)
        if _rank(group) != 0:
            return
        if not self.may_commit(step):
            logger.warning("the checkpoint of step %d is not kept: this rank may not commit it (see above)", step)
            return
        writers = dist.get_process_group_ranks(group) if group is not None else list(range(_size()))
        about = {"world_size": _size(), "written_by": writers, "how": how}
        if self.stretches is not None:
            about |= self.stretches.about(step)
        self._folder.put_in_place(draft, step, about)
        took_s = time.monotonic() - start
        logger.info("the checkpoint of step %d is complete after %.1f s: %s", step, took_s, self._folder.of(step))
        self.kept(step, how, took_s)
        self._folder.tidy()

    def _tell(self, step: int, how: str, took_s: float) -> None:
        if _rank(None) == 0:
            self.kept(step, how, took_s)

    def _newest(self) -> int | None:
        mine = self._folder.steps()[-_MOST:]
        if not dist.is_initialized():
            return mine[-1] if mine else None
        device = _device(None)
        padded = torch.tensor(mine + [-1] * (_MOST - len(mine)), dtype=torch.int64, device=device)
        found = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
        dist.all_gather(found, padded)
        seen = [{step for step in steps.tolist() if step >= 0} for steps in found]
        if common := set.intersection(*seen):
            return int(max(common))
        if blind := [rank for rank, steps in enumerate(seen) if steps != set.union(*seen)]:
            raise RuntimeError(
                f"not every rank sees the same checkpoints in {self._folder.path} (rank {blind[0]} sees "
                f"{sorted(seen[blind[0]]) or 'none'}, together they have {sorted(set.union(*seen))}): it has to be on "
                "a filesystem that all nodes share"
            )
        return None


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank(group: Group) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _sum(values: list[int], group: Group) -> list[int]:
    """Sum over all ranks of the group; returns when all of them are here. Raises RuntimeError when it was cut."""
    if not dist.is_initialized():
        return values
    flags = torch.tensor([1, *values], dtype=torch.int64, device=_device(group))
    dist.all_reduce(flags, group=group)
    count, *sums = flags.tolist()
    size = dist.get_world_size(group)
    if count != size:  # an aborted NCCL collective "succeeds"
        raise RuntimeError(f"ProcessGroup: {count} of {size} ranks were counted at a checkpoint")
    return [int(value) for value in sums]


def _device(group: Group) -> torch.device:
    backends = str(dist.get_backend_config(group))
    return torch.device("cpu") if "gloo" in backends else torch.device("cuda", torch.cuda.current_device())
