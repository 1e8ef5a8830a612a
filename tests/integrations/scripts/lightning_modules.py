"""Fits a module with Lightning's Trainer: with `--ours` on gyrostat's strategy, otherwise on Lightning's DDP.

Rank 0 writes what it has at the end: a digest of parameters, buffers and optimizer, what was logged, metrics, predictions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("--ours", action="store_true")
parser.add_argument("--module", default="net")
parser.add_argument("--trainer", default="{}")
parser.add_argument("--loader", default="{}")
parser.add_argument("--random", action="store_true", help="the collator draws")
parser.add_argument("--test", action="store_true")
parser.add_argument("--predict", action="store_true")
parser.add_argument("--out", required=True)
parser.add_argument("--result", required=True)
given = parser.parse_args()
torch.set_num_threads(1)

if given.ours:
    from gyrostat.integrations.lightning import GyrostatStrategy
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402
from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402


class Net(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("mine", loss * (1 + batch_idx), on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        found = self(x)
        self.log("val", torch.nn.functional.cross_entropy(found, y), sync_dist=True)
        self.log("right", (found.argmax(1) == y).float().mean(), sync_dist=True, reduce_fx="max")
        self.log("local", float(found.sum()))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found: torch.Tensor = self(batch[0])
        return found

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recorder(pl.Callback):  # type: ignore[misc]
    """What callbacks see: also that the loops count as they do under DDP."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.callback_metrics.get("train_step")
        if trainer.fit_loop.epoch_loop._should_accumulate() is False:
            self.seen.append(
                [trainer.global_step, trainer.current_epoch, None if step is None else float(step)]
            )

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append(
                ["val", {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}]
            )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def collate(samples: list[Any]) -> list[torch.Tensor]:
    x, y = torch.utils.data.default_collate(samples)
    return [x + torch.randn(x.shape) * 0.1, y]


pl.seed_everything(5, workers=True, verbose=False)
numbers = torch.Generator().manual_seed(0)
if given.module == "net":
    module: Any = Net()
    data = TensorDataset(torch.randn(53, 6, generator=numbers), torch.randint(0, 3, (53,), generator=numbers))
    held_out = TensorDataset(
        torch.randn(19, 6, generator=numbers), torch.randint(0, 3, (19,), generator=numbers)
    )
    options = {
        "batch_size": 3,
        **({"collate_fn": collate} if given.random else {}),
        **json.loads(given.loader),
    }
    loaders = {
        "train_dataloaders": DataLoader(data, shuffle=True, **options),
        "val_dataloaders": DataLoader(held_out, batch_size=4),
    }
else:
    module, loaders = BoringModel(), {}
chosen = json.loads(given.trainer)
recorder = Recorder()
callbacks: list[Any] = [recorder]
if chosen.pop("early_stopping", False):
    callbacks.append(EarlyStopping("val", patience=1, min_delta=0.05))
if chosen.pop("checkpoints", False):
    callbacks.append(ModelCheckpoint(given.out, monitor="val", save_top_k=1, filename="best"))
    chosen["enable_checkpointing"] = True
trainer = pl.Trainer(
    **{
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 0.5,
        **chosen,
        **(
            {"strategy": GyrostatStrategy()}
            if given.ours
            else {"strategy": DDPStrategy(), "devices": int(os.environ["WORLD_SIZE"])}
        ),
    },
    callbacks=callbacks,
)
trainer.fit(module, **loaders)
tested = trainer.test(module, loaders["val_dataloaders"], verbose=False) if given.test else None
predicted = trainer.predict(module, loaders["val_dataloaders"]) if given.predict else None

if trainer.is_global_zero:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.detach().float().numpy().tobytes())
    for _, moments in sorted(trainer.optimizers[0].state_dict()["state"].items()):
        for name, tensor in sorted(moments.items()):
            digest.update(name.encode() + torch.as_tensor(tensor).float().numpy().tobytes())
    best = trainer.checkpoint_callback
    result = {
        "digest": digest.hexdigest(),
        "global_step": trainer.global_step,
        "seen": recorder.seen,
        "best": None
        if best is None
        else [float(best.best_model_score), os.path.exists(best.best_model_path)],
        "tested": tested,
        "predicted": None if predicted is None else [each.tolist() for each in predicted],
        "gyrostat": "gyrostat" in sys.modules and not given.ours,
    }
    with open(given.result, "w") as file:
        json.dump(result, file)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that takes its group down while others still use it
