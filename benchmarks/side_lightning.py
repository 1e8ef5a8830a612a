"""One side of `lightning_throughput.py`: Lightning's demo Transformer with its own strategy, or gyrostat's."""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from turns import Turns

warnings.filterwarnings("ignore")
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ours", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--turns", required=True)
args = parser.parse_args()
torch.set_num_threads(1)

if args.ours:
    from gyrostat.integrations.lightning import GyrostatStrategy
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.demos import Transformer  # noqa: E402

BATCH = 8


class Language(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=1000, ninp=128, nhid=256, nlayers=2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        output = self.model(tokens, tokens)
        return torch.nn.functional.nll_loss(output, tokens.reshape(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TakesTurns(pl.Callback):  # type: ignore[misc]
    """Ends training with the last turn."""

    turns: Turns

    def on_train_start(self, *_: Any) -> None:
        self.turns = Turns(args.turns)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % args.accumulate == 0 and not self.turns.step_done():
            trainer.should_stop = True


pl.seed_everything(1, verbose=False)
processes = int(os.environ.get("WORLD_SIZE", "1"))
others: dict[str, Any] = (
    {"strategy": "ddp_find_unused_parameters_false", "devices": processes} if processes > 1 else {}
)
trainer = pl.Trainer(
    max_epochs=-1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    accumulate_grad_batches=args.accumulate,
    callbacks=[TakesTurns()],
    **({"strategy": GyrostatStrategy()} if args.ours else others),
)
trainer.fit(
    Language(),
    DataLoader(TensorDataset(torch.randint(0, 1000, (4096, 32))), batch_size=BATCH, drop_last=True),
)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that takes its group down while others still use it
