"""Trains a tiny GPT-2, BERT or ViT with Hugging Face's Trainer: with `--ours` gyrostat's, which is the only line that differs.

Rank 0 writes what it has at the end: a digest of parameters and optimizer, the log, metrics, predictions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from typing import Any

import numpy as np
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--ours", action="store_true")
parser.add_argument("--model", default="gpt2")
parser.add_argument("--args", default="{}")
parser.add_argument("--predict", action="store_true")
parser.add_argument(
    "--unseeded", action="store_true", help="every process makes other initial weights; rank 0's count"
)
parser.add_argument("--out", required=True)
parser.add_argument("--result", required=True)
given = parser.parse_args()
torch.set_num_threads(1)

if given.ours:
    from gyrostat.integrations.transformers import Trainer
else:
    from transformers import Trainer  # type: ignore[no-redef]
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
    set_seed,
)


def texts(count: int, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """Of different lengths, so that a loss weighted by tokens matters."""
    made = []
    for _ in range(count):
        tokens = torch.randint(3, 101, (16,), generator=generator)
        labels = tokens.clone()
        labels[int(torch.randint(4, 16, (), generator=generator)) :] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def images(count: int, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    return [
        {
            "pixel_values": torch.randn(3, 8, 8, generator=generator),
            "labels": torch.randint(0, 4, (), generator=generator),
        }
        for _ in range(count)
    ]


def masked(samples: list[Any]) -> dict[str, Any]:
    """Masks at random, as a collator for masked language models does: draws in every batch."""
    batch: dict[str, Any] = default_data_collator(samples)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3
    batch["labels"] = torch.where(hidden, batch["input_ids"], -100)
    batch["input_ids"] = torch.where(hidden, 1 + np.random.randint(2), batch["input_ids"])
    return batch


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


set_seed(3)
random_numbers = torch.Generator().manual_seed(0)
options: dict[str, Any] = {}
model: Any
if given.model == "gpt2":
    data = texts(50, random_numbers)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=101, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    if given.unseeded:
        torch.seed()
    model = GPT2LMHeadModel(config)
elif given.model == "bert":
    data = texts(50, random_numbers)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = BertForMaskedLM(BertConfig(vocab_size=101, max_position_embeddings=16, **size))
    options["data_collator"] = masked
else:
    data = images(50, random_numbers)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=4, num_labels=4, hidden_dropout_prob=0.1, **size)
    )
    options["compute_metrics"] = accuracy
chosen = json.loads(given.args)
if chosen.pop("early_stopping", False):
    options["callbacks"] = [EarlyStoppingCallback(early_stopping_patience=1)]
settings = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 3,
    "num_train_epochs": 2,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 2,
    "disable_tqdm": True,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "max_grad_norm": 0.5,
    **chosen,
}
trainer = Trainer(
    model=model,
    args=TrainingArguments(given.out, **settings),
    train_dataset=data[:31],
    eval_dataset=data[31:],
    **options,
)
trainer.train()
predictions = trainer.predict(data[31:]) if given.predict else None


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in values.items() if not key.endswith(("runtime", "per_second", "_time"))
    }


if trainer.is_world_process_zero():
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    for _, moments in sorted(trainer.optimizer.state_dict()["state"].items()):
        for name, tensor in sorted(moments.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    result = {
        "digest": digest.hexdigest(),
        "global_step": trainer.state.global_step,
        "log": [without_times(entry) for entry in trainer.state.log_history],
        "best": trainer.state.best_metric,
        "flos": trainer.state.total_flos,
        "predictions": None if predictions is None else predictions.predictions.tolist(),
        "metrics": None if predictions is None else without_times(predictions.metrics),
        "gyrostat": "gyrostat" in sys.modules and not given.ours,
    }
    with open(given.result, "w") as file:
        json.dump(result, file)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that takes its group down while others still use it
