"""A GPT-2 from a config, trained with Hugging Face's Trainer on the text of Python's standard library.

    gyrostat run -n 8 -w 2 examples/transformers_text.py

With `from transformers import Trainer` instead, the same script runs under torchrun, with the same bits.
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from gyrostat.integrations.transformers import Trainer
from stdlib_text import VOCABULARY, load

LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="/tmp/gyrostat-example")
    args = parser.parse_args()
    set_seed(1)
    train, held_out = (_windows(tokens) for tokens in load(90_000))
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=64,
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            args.out,
            per_device_train_batch_size=4,
            max_steps=args.steps,
            learning_rate=3e-3,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=50,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=train,
        eval_dataset=held_out,
    )
    trainer.train()


def _windows(tokens: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    windows = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return [{"input_ids": window, "labels": window} for window in windows]


if __name__ == "__main__":
    main()
