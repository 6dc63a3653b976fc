"""A strategy for Lightning's Trainer: DDP whose steps survive the loss of a rank or a node.

    trainer = L.Trainer(strategy=FlashRecoveryStrategy(), …)

Lightning asks its strategy for three things that together are a step: the loader (`process_dataloader`), forward and
backward with the update after it (`optimizer_step`, to which they come as a closure), the end (`on_train_end`). So

* the batch is that of the session's step, whatever position Lightning's own iterator has,
* an update that a failure has hit is done again in here, and Lightning does not notice,
* a step is closed when Lightning asks for the next batch. Until then come schedulers, callbacks, validation and the
  broadcast with which Lightning begins each batch: ranks resume after all of it, and a replacement begins there.

See docs/decisions/0038-enter-loops-where-they-ask.md and docs/guides/lightning.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

import flashrec
from flashrec.runtime import environment
from flashrec.runtime.data import Data
from flashrec.runtime.session import Step


class FlashRecoveryStrategy(DDPStrategy):
    """DDP with recovery. Takes what DDPStrategy takes; seed: see `flashrec.Session`.

    Raises NotImplementedError before the first step for what could not be recovered, with the reason.
    """

    def __init__(self, *, seed: int | None = 0, **options: Any) -> None:
        found = environment.read(os.environ)
        if found is not None:
            options.setdefault("cluster_environment", LauncherEnvironment())
        super().__init__(**options)
        self._seed = seed
        self._is_alone = found is not None and found.joins  # a replacement that has not been restored yet
        self._session: flashrec.Session | None = None
        self._trainer: Trainer | None = None
        self._steps: Iterator[Step] | None = None
        self._step: Step | None = None
        self._data: Data | None = None
        self._is_redone = False

    @property
    def session(self) -> flashrec.Session:
        """For `on_commit`, `may_commit` and `quiet`; from the hook `on_fit_start` on."""
        assert self._session is not None, "there is no session before the strategy is set up for fit()"
        return self._session

    # ---- what Lightning calls

    def setup_environment(self) -> None:
        flashrec.init()
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self._session is not None:
            raise NotImplementedError("one fit() with FlashRecoveryStrategy in a process: a replacement knows the last")
        _refuse(trainer)
        assert self.model is not None
        self._trainer = trainer
        self._session = flashrec.Session(
            self.model,
            self.optimizers,
            state={"schedulers": Schedulers(trainer), "callbacks": Callbacks(trainer)},
            seed=self._seed,
        )

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        return Batches(self, dataloader) if trainer is not None and trainer.training else dataloader

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_redone:  # the step may have changed the batch in place when it was cut
            assert self._data is not None and self._step is not None
            batch = self.batch_to_device(self.precision_plugin.convert_input(self._data.batch(self._step)))
        return super().training_step(batch, *args, **kwargs)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Forward, backward and update of one step; again and again until it counts."""
        step, self._is_redone = self._step, False
        while step is not None:
            step.__enter__()
            try:
                return super().optimizer_step(ClosureFirst(optimizer), closure, model, **kwargs)
            except BaseException as error:
                if not step.__exit__(type(error), error, error.__traceback__):
                    raise
            assert self._steps is not None
            self._step = step = None if step.is_done else next(self._steps)
            self._is_redone = True
        return None

    def on_train_end(self) -> None:
        super().on_train_end()
        self._close()
        for step in self._steps or ():
            raise RuntimeError(f"fit() ends before step {step} of those it has announced, which no rank can know alone")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._is_alone else super().broadcast(obj, src)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.session.quiet("checkpoint"):  # rank 0 writes, and the others wait for it
            super().save_checkpoint(*args, **kwargs)

    # ---- steps

    def next_batch(self, loader: Any) -> Any:
        """Close the step before, and the batch of the next one. A replacement is restored in here."""
        self._close()
        assert self._trainer is not None
        is_first = self._steps is None
        if self._steps is None:
            self._steps = self.session.steps(_num_steps(self._trainer, loader))
            self._data = self.session.data(loader)
        self._step = next(self._steps)
        if is_first and self._step > 0:
            _place(self._trainer, self._step)
        self._is_alone = False
        assert self._data is not None
        return self._data.batch(self._step)

    def _close(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)


class LauncherEnvironment(TorchElasticEnvironment):
    """Ranks as `flashrec run` says them, which are torchrun's variables. Slurm's would be those of the job step, and a
    replacement has one of its own."""


class Batches:
    """The train loader as Lightning sees it: one batch of the session after the other, an epoch long."""

    def __init__(self, strategy: FlashRecoveryStrategy, loader: Any) -> None:
        try:
            self._num = len(loader)
        except TypeError:
            raise NotImplementedError("a train loader without a length: its epochs could not be counted") from None
        self._strategy, self._loader = strategy, loader

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._num):
            yield self._strategy.next_batch(self._loader)


class ClosureFirst:
    """An optimizer whose step runs the closure and then updates: the vote lies between the two. Lightning clips the
    gradients in the closure."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any]) -> Any:
        result = closure()
        self._optimizer.step()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Schedulers:
    """Those of a trainer as one object with a state."""

    def __init__(self, trainer: Trainer) -> None:
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]

    def state_dict(self) -> dict[str, Any]:
        return {str(index): scheduler.state_dict() for index, scheduler in enumerate(self._schedulers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, scheduler in enumerate(self._schedulers):
            scheduler.load_state_dict(state[str(index)])


class Callbacks:
    """Those that say in `state_dict()` what they remember, under the keys of Lightning's checkpoints."""

    def __init__(self, trainer: Trainer) -> None:
        self._callbacks = {callback.state_key: callback for callback in trainer.callbacks}

    def state_dict(self) -> dict[str, Any]:
        states = {key: callback.state_dict() for key, callback in self._callbacks.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, inner in state.items():
            self._callbacks[key].load_state_dict(inner)


def _refuse(trainer: Trainer) -> None:
    """Raises NotImplementedError for what could not be recovered."""
    module = trainer.lightning_module
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    reasons = {
        "automatic_optimization=False: its steps lie in training_step, out of the strategy's sight": (
            not module.automatic_optimization
        ),
        "accumulate_grad_batches: an update has one batch": trainer.accumulate_grad_batches != 1,
        "several optimizers": len(trainer.optimizers) != 1,
        "a GradScaler (16-mixed): use bf16-mixed": scaler is not None,
        "EarlyStopping: ranks must know the number of steps from the start": bool(trainer.early_stopping_callbacks),
        "reload_dataloaders_every_n_epochs": bool(trainer.reload_dataloaders_every_n_epochs),
        "fit(ckpt_path=…): load the weights in the script": trainer.ckpt_path is not None,
    }
    if found := [reason for reason, is_there in reasons.items() if is_there]:
        raise NotImplementedError(f"FlashRecoveryStrategy cannot recover: {'; '.join(found)}")


def _num_steps(trainer: Trainer, loader: Any) -> int:
    """Of the whole fit(). Raises NotImplementedError when it is not known or epochs are not whole ones."""
    number = trainer.estimated_stepping_batches
    if number in (-1, float("inf")):
        raise NotImplementedError("a fit() without an end: say max_epochs or max_steps")
    if trainer.num_training_batches != len(loader):
        raise NotImplementedError("limit_train_batches: epochs must be whole, for the batch follows from the step")
    return int(number)


def _place(trainer: Trainer, step: int) -> None:
    """Set what Lightning counts for itself, in a replacement, to where training goes on: before the batch of `step`."""
    epoch, batch = divmod(step, int(trainer.num_training_batches))
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    for progress in (fit.epoch_progress.total, fit.epoch_progress.current):
        _set(progress, epoch)
        progress.ready = progress.started = epoch + 1
    for progress in (loop.batch_progress, optimizer.step, optimizer.zero_grad):
        _set(progress.total, step)
        _set(progress.current, batch)
    loop.on_load_checkpoint({"_batches_that_stepped": step})  # the step that loggers show


def _set(tracker: Any, number: int) -> None:
    for name in vars(tracker):
        setattr(tracker, name, number)
