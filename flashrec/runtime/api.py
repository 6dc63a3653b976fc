"""What a training script uses: `init` and `Session`. Without `flashrec run` both let the script run as it is.

    flashrec.init()
    dist.init_process_group("gloo")
    …
    session = flashrec.Session(model, optimizer, state={"scheduler": scheduler})
    for step in session.steps(1000):
        with step:
            …forward, backward, optimizer.step(), scheduler.step()

See docs/concepts/training-script.md for the rules of the block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from flashrec.runtime import environment, farewell, quiet, worker
from flashrec.runtime.callbacks import Callback
from flashrec.runtime.checkpoint import Checkpoints, Load, Save
from flashrec.runtime.checkpoint_folder import CheckpointFolder
from flashrec.runtime.data import Data
from flashrec.runtime.limits import Limits
from flashrec.runtime.loading import ByIndex, source_of
from flashrec.runtime.registered import registered
from flashrec.runtime.session import Guard, PassThrough, Step, StepLoop, recoverable_guard
from flashrec.runtime.stretches import OnResize, Stretches
from flashrec.runtime.timeline import logger
from flashrec.transport import task


class _Process:
    """The one handle of this process: `init` sets it, `Session` reads it."""

    worker: worker.Worker | None = None


def init(limits: Limits | None = None) -> None:
    """Take part in recovery, if the script was started by `flashrec run`; else do nothing.

    Call it once, before `dist.init_process_group`. In a parked process (`hot.park: script`) it returns when there is a
    rank. Raises RuntimeError, ImportError (torch not supported), ConnectionError (agent not reachable).
    """
    if task.PARKED in os.environ:
        task.await_assignment()
    env = environment.read(os.environ)
    if env is None:
        logger.debug("FLASHREC_SOCKET is not set: training without recovery")
        return
    if _Process.worker is not None:
        raise RuntimeError("flashrec.init() was called twice")
    _Process.worker = worker.start(env, limits or Limits())
    farewell.install(_Process.worker)


class Session:
    """The training state of this rank and the loop over its steps.

    model: the module that is trained: plain, in DistributedDataParallel, of DTensors, or with fully_shard applied; the
    session is created after that. optimizer: one or several.
    state: whatever else a replacement needs, by name: objects with state_dict() and load_state_dict(), and generators
    of random numbers (torch, numpy, Python), all of them alike on the ranks that are replicas.
    seed: at each step start Python, numpy and torch are seeded from (seed, step, rank); None turns that off, and a
    replacement then gets the random state of its source. seed_rank: stands for the rank in that; ranks of one tensor
    parallel group must draw the same and give the same number, that of their group for example. replicas: ranks that
    hold the same state as this one; by default found from DDP groups and meshes. pipeline: the schedule of
    torch.distributed.pipelining that runs the model, or a list of them. optimizer_communicates: True when
    `optimizer.step()` waits for other ranks (ZeRO, Muon over several ranks): an update that a failure cuts is then
    undone, which costs a copy of parameters and optimizer state. None: seen in the first steps. mirrors: True to keep
    the state of each rank that has no replica on another node in the host memory of a rank there, step by step; 'all':
    of every rank; 'process': on any other rank, for a job on one node. See docs/concepts/mirrors.md.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        state: Mapping[str, Any] | None = None,
        *,
        seed: int | None = 0,
        seed_rank: int | None = None,
        replicas: Sequence[int] | None = None,
        pipeline: Any = None,
        optimizer_communicates: bool | None = None,
        mirrors: bool | str = False,
    ) -> None:
        schedules = [] if pipeline is None else list(pipeline) if isinstance(pipeline, list | tuple) else [pipeline]
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        objects = registered(state or {})
        self._stretches = Stretches()
        guard: Guard
        if _Process.worker is not None:
            guard = recoverable_guard(
                _Process.worker,
                model,
                optimizers,
                objects,
                replicas,
                seed,
                seed_rank,
                schedules,
                optimizer_communicates,
                mirrors,
                self._stretches,
            )
        elif environment.read(os.environ) is not None:
            raise RuntimeError("call flashrec.init() before dist.init_process_group(…) and flashrec.Session(…)")
        else:
            guard = PassThrough(seed, seed_rank)
        self._loop = StepLoop(guard)
        self._seed, self._mirrors = seed or 0, mirrors

    def steps(self, num_steps: int, start: int = 0) -> Iterator[Step]:
        """Yield the steps `start` … `num_steps` - 1; a step that a failure has hit is yielded again."""
        yield from self._loop.steps(num_steps, start)
        self._stretches.close()

    def data(self, loader: Any, *, micro_batches: int = 1, seed: int | None = None) -> Data:
        """The batches of `loader` by step: `data.batch(step)` inside the block, or `data.batch(step, micro)`.

        loader: a DataLoader (or StatefulDataLoader) of any sampler; what else can be iterated is read through from its
        beginning by a replacement. micro_batches: per step. seed: of order and augmentation, the same on ranks that
        shall read the same; by default that of the session. See docs/concepts/data.md. Raises TypeError, ValueError,
        NotImplementedError for a loader whose batches could not be repeated.
        """
        source = source_of(loader, self._seed if seed is None else seed, lambda: self._loop.num_batches(micro_batches))
        if isinstance(source, ByIndex) and not (_Process.worker and _Process.worker.env.joins):
            source.check_order()
        undone = 1 if self._mirrors else 0  # a step that counts may be done again
        return self._stretches.add_data(
            lambda begins: Data(source, micro_batches, lambda: self._loop.position - undone, self.quiet, begins)
        )

    def on_resize(self, callback: OnResize) -> OnResize:
        """Call `callback(old, new)` when the state of a world of `old` ranks goes on in one of `new` ranks.

        It is called on every rank, once, when that state is there and before the first step with it: to adapt the
        learning rate, for example. It changes what is registered with the session and nothing else: a replacement that
        joins later gets that from its source, and is not called. May be used as a decorator. See
        docs/concepts/resize.md. Raises TypeError.
        """
        self._stretches.add_callback(callback)
        return callback

    def on_commit(self, callback: Callback) -> Callback:
        """Call `callback(step)` once for each step that counts, after its block and before the next one; on every rank.

        May be used as a decorator. Not called for a step that is redone, until it counts. A replacement begins with the
        step at which training goes on: see docs/concepts/data.md for what that means. Exceptions are the script's.
        """
        self._loop.callbacks.add(callback)
        return callback

    def checkpoint(self, folder: str | Path, *, save: Save, load: Load, every: int, keep: int = 2) -> None:
        """Keep checkpoints in `folder`, which all nodes share, and go on from the newest complete one.

        save(path, group): write the state of this rank into the folder `path`. Called on all ranks before each step
        that is a multiple of `every`; group is None then. When lost ranks have no node it is called on those that are
        left, and `group` is a process group (gloo) of them: only those share the work then. load(path): read it back.
        Called on all ranks when `steps` begins. keep: how many complete ones stay. What the hooks raise is the
        script's. Call it once, before `steps`. See docs/concepts/ladder.md. Raises ValueError, RuntimeError.
        """
        if every < 1 or keep < 1:
            raise ValueError(f"session.checkpoint(every={every}, keep={keep}): both must be at least 1")
        checkpoints = Checkpoints(CheckpointFolder(Path(folder), keep), save, load, every)
        checkpoints.stretches = self._stretches
        self._loop.use(checkpoints)

    def may_commit(self, step: int | None = None, timeout_s: float = 10.0) -> bool:
        """May this rank put its checkpoint of `step` in place now? step: None for the number of steps done so far.

        False: this rank was replaced, a recovery has begun, something newer was committed, or nobody answered within
        `timeout_s` seconds. Ask just before the rename: a True is good for a moment only (control.lease_s / 4). Without
        `flashrec run` it is always True.
        """
        return self._loop.may_commit(step, timeout_s)

    def quiet(self, reason: str) -> AbstractContextManager[None]:
        """`with session.quiet("checkpoint"):` this rank may stand still in here without being taken for hung."""
        return quiet.quiet(_Process.worker, reason)
