"""A small classifier, trained with Lightning's Trainer.

    gyrostat run -n 8 -w 2 examples/lightning_net.py

With `strategy="ddp"` instead, the same script runs on 8 processes, with the same bits.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from gyrostat.integrations.lightning import GyrostatStrategy


class Net(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(20, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(64, 4),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    pl.seed_everything(1)
    x = torch.randn(2048, 20)
    y = (x @ torch.randn(20, 4)).argmax(1)
    train, held_out = TensorDataset(x[:1536], y[:1536]), TensorDataset(x[1536:], y[1536:])
    trainer = pl.Trainer(
        strategy=GyrostatStrategy(),
        accelerator="cpu",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(held_out, batch_size=64))
    if trainer.is_global_zero:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")


if __name__ == "__main__":
    main()
