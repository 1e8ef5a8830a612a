"""One side of `transformers_throughput.py`: a small GPT-2 with Hugging Face's Trainer, or gyrostat's."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from turns import Turns

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ours", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--turns", required=True)
args = parser.parse_args()
torch.set_num_threads(1)

if args.ours:
    from gyrostat.integrations.transformers import Trainer
else:
    from transformers import Trainer  # type: ignore[no-redef]
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed  # noqa: E402

BATCH = 8


class TakesTurns(TrainerCallback):  # type: ignore[misc]
    """Ends training with the last turn."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.turns = Turns(args.turns)

    def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = not self.turns.step_done()


set_seed(1)
tokens = torch.randint(0, 1000, (4096, 32))
trainer = Trainer(
    model=GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=128, vocab_size=1000, n_positions=32)),
    args=TrainingArguments(
        "/tmp/gyrostat-benchmark",
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=args.accumulate,
        max_steps=1_000_000,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    callbacks=[TakesTurns()],
)
trainer.train()
