"""What an integration cannot recover it says before the first step, with the reason."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flashrec.runtime.loading import ByIndex, source_of

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def frameworks() -> None:
    missing = [name for name in ("accelerate", "lightning") if importlib.util.find_spec(name) is None]
    assert not missing, f"{', '.join(missing)} is not installed: make integrations"


@pytest.fixture
def only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer sees the only rank of a world."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)


def loader(num_samples: int = 16) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(num_samples)), 2, shuffle=True)


def trainer_with(module: Any = None, num_optimizers: int = 1, **options: Any) -> Any:
    """A Trainer with our strategy, as it is when the strategy has been set up."""
    import lightning as L

    from flashrec.integrations.lightning import FlashRecoveryStrategy, LauncherEnvironment

    module = module or L.LightningModule()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = FlashRecoveryStrategy(cluster_environment=LauncherEnvironment())
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, **(quiet | options))
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.strategy.optimizers = [torch.optim.SGD(nn.Linear(1, 1).parameters()) for _ in range(num_optimizers)]
    return trainer


def manual() -> Any:
    import lightning as L

    module = L.LightningModule()
    module.automatic_optimization = False
    return module


def early_stopping() -> Any:
    from lightning.pytorch.callbacks import EarlyStopping

    return EarlyStopping(monitor="loss")


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"num_optimizers": 2}, "several optimizers"),
        ({"module": manual}, "automatic_optimization=False"),
        ({"callbacks": early_stopping}, "EarlyStopping"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
    ],
)
def test_lightning_says_what_cannot_be_recovered(options: dict[str, Any], reason: str) -> None:
    from flashrec.integrations.lightning import _refuse

    made = {name: value() if callable(value) else value for name, value in options.items()}
    with pytest.raises(NotImplementedError, match=reason):
        _refuse(trainer_with(**made))


@pytest.mark.usefixtures("only_rank")
def test_lightning_has_nothing_against_a_plain_fit() -> None:
    from flashrec.integrations.lightning import _refuse

    _refuse(trainer_with())


def test_a_train_loader_without_a_length_is_refused() -> None:
    from flashrec.integrations.lightning import Batches, FlashRecoveryStrategy

    with pytest.raises(NotImplementedError, match="without a length"):
        Batches(FlashRecoveryStrategy(), iter([1, 2]))


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, "without an end"), ({"max_epochs": 2, "limit_train_batches": 3}, "limit_train_batches")],
)
def test_the_number_of_steps_must_follow_from_the_start(options: dict[str, Any], reason: str) -> None:
    from lightning.pytorch.utilities import CombinedLoader

    from flashrec.integrations.lightning import _num_steps

    trainer, data = trainer_with(**({"max_epochs": -1} | options)), loader()
    trainer.fit_loop.max_batches = min(len(data), options.get("limit_train_batches", len(data)))
    trainer.fit_loop._combined_loader = CombinedLoader(data)
    with pytest.raises(NotImplementedError, match=reason):
        _num_steps(trainer, data)


def prepared(**configuration: Any) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
    return accelerator.prepare(loader())


def test_a_loader_that_accelerate_has_prepared_is_read_by_index() -> None:
    """Its own iterator would begin with a broadcast."""
    source = source_of(prepared(), 0, lambda: 8)
    assert isinstance(source, ByIndex)
    read = [batch[0].tolist() for _, batch in source.read(0)]
    assert sorted(sample for batch in read for sample in batch) == list(range(16))
    assert [batch[0].tolist() for _, batch in source.read(5)] == read[5:]


def test_a_loader_that_reads_on_rank_0_for_all_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="dispatch_batches=False"):
        source_of(prepared(dispatch_batches=True), 0, lambda: 8)
