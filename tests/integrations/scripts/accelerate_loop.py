"""The loop of Accelerate's own example `nlp_example.py`, on a tiny BERT: with `--ours` on gyrostat's Accelerator."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--ours", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--precision", default="no")
parser.add_argument("--state", action="store_true", help="save the state, and load it again")
parser.add_argument("--out", required=True)
parser.add_argument("--result", required=True)
given = parser.parse_args()
torch.set_num_threads(1)

if given.ours:
    from gyrostat.integrations.accelerate import Accelerator
else:
    from accelerate import Accelerator  # type: ignore[no-redef]
from accelerate.utils import set_seed  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup  # noqa: E402

accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=given.accumulate, mixed_precision=given.precision
)
set_seed(11)
numbers = torch.Generator().manual_seed(0)
data = [
    {
        "input_ids": torch.randint(3, 101, (12,), generator=numbers),
        "labels": torch.randint(0, 2, (), generator=numbers),
        "number": number,
    }
    for number in range(58)
]
train_dataloader: Any = DataLoader(data[:37], shuffle=True, batch_size=2)  # type: ignore[arg-type]
eval_dataloader: Any = DataLoader(data[37:], shuffle=False, batch_size=4)  # type: ignore[arg-type]
size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
model: Any = BertForSequenceClassification(BertConfig(vocab_size=101, max_position_embeddings=12, **size))
optimizer: Any = torch.optim.AdamW(params=model.parameters(), lr=2e-3)
lr_scheduler: Any = get_linear_schedule_with_warmup(
    optimizer=optimizer,
    num_warmup_steps=4,
    num_training_steps=(len(train_dataloader) * 2) // given.accumulate,
)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
seen: list[Any] = []
for epoch in range(2):
    model.train()
    for batch in train_dataloader:
        batch.pop("number")
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
    model.eval()
    evaluated: list[int] = []
    right = 0
    for batch in eval_dataloader:
        number = batch.pop("number")
        with torch.no_grad():
            outputs = model(**batch)
        predictions, labels, number = accelerator.gather_for_metrics(
            (outputs.logits.argmax(dim=-1), batch["labels"], number)
        )
        right += int((predictions == labels).sum())
        evaluated += number.tolist()
    seen.append([epoch, right, evaluated])
    if given.state:
        accelerator.save_state(given.out)
        accelerator.wait_for_everyone()
        accelerator.load_state(given.out)

accelerator.wait_for_everyone()
if accelerator.is_main_process:
    digest = hashlib.sha256()
    for name, tensor in sorted(accelerator.unwrap_model(model).state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    for _, moments in sorted(optimizer.state_dict()["state"].items()):
        for name, tensor in sorted(moments.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    result = {
        "digest": digest.hexdigest(),
        "rate": lr_scheduler.get_last_lr(),
        "seen": seen,
        "gyrostat": "gyrostat" in sys.modules and not given.ours,
    }
    with open(given.result, "w") as file:
        json.dump(result, file)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that takes its group down while others still use it
