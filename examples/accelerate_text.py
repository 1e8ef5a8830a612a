"""A BERT from a config that learns to count, in a loop of its own on Accelerate.

    gyrostat run -n 8 -w 2 examples/accelerate_text.py

With `from accelerate import Accelerator` instead, the same script runs under `accelerate launch`, with the same bits.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from gyrostat.integrations.accelerate import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    tokens = torch.randint(3, 60, (768, 16))
    labels = ((tokens > 30).sum(1) > 8).long()
    data: Any = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    size = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model: Any = BertForSequenceClassification(BertConfig(vocab_size=60, max_position_embeddings=16, **size))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train: Any = DataLoader(data[:640], batch_size=8, shuffle=True)
    held_out: Any = DataLoader(data[640:], batch_size=32)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        for batch in held_out:
            with torch.no_grad():
                found = model(**batch).logits.argmax(dim=-1)
            found, wanted = accelerator.gather_for_metrics((found, batch["labels"]))
            right += int((found == wanted).sum())
        accelerator.print(f"epoch {epoch}: {right} of 128 right")


if __name__ == "__main__":
    main()
