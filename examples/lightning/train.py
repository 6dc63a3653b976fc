"""A small classifier trained by Lightning's Trainer with DDP.

    torchrun --nproc-per-node 2 plain.py --epochs 4 --nodes 1 --devices 2
    flashrec run --local --nodes 3 -- python train.py --epochs 4 --nodes 2 --devices 1

`plain.py` and `train.py` are the same script without and with recovery; docs/guides/lightning.md shows the difference.
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flashrec.integrations.lightning import FlashRecoveryStrategy

BATCH = 16


def spirals(num_samples: int) -> TensorDataset:
    """Points (num_samples, 2) on three noisy arms of a spiral, and which arm: made here, nothing to download."""
    generator = torch.Generator().manual_seed(1)
    arm = torch.randint(3, (num_samples,), generator=generator)
    radius = torch.rand(num_samples, generator=generator)
    angle = 4 * radius + arm * (2 * torch.pi / 3) + 0.2 * torch.randn(num_samples, generator=generator)
    return TensorDataset(torch.stack([radius * angle.sin(), radius * angle.cos()], dim=1), arm)


class Classifier(L.LightningModule):
    """Which arm of the spiral a point is on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))

    def training_step(self, batch, batch_idx):
        points, arm = batch
        points += 0.01 * torch.randn_like(points)
        loss = nn.functional.cross_entropy(self.layers(points), arm)
        self.log("loss", loss)
        print(f"step {self.global_step} rank {self.global_rank} loss {loss.item():.9g}", flush=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data")
    parser.add_argument("--samples", type=int, default=512, help="size of the data set")
    parser.add_argument("--nodes", type=int, default=1, help="nodes with ranks")
    parser.add_argument("--devices", type=int, default=1, help="ranks of a node")
    options = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(spirals(options.samples), BATCH, shuffle=True)
    trainer = L.Trainer(
        strategy=FlashRecoveryStrategy(),
        accelerator="cpu",
        num_nodes=options.nodes,
        devices=options.devices,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
