"""A small GPT with dropout, one character at a time, on the text of Python's standard library.

    gyrostat run --virtual-workers 4 --workers 2 examples/gpt.py

What it shows: dropout draws from each virtual worker's own random stream, so the bits do not depend on
who shares a process with whom. Two parameter groups (with and without weight decay), clipping, warm-up
and cosine decay. The validation loss is printed next to that of a model that knows only character
frequencies, and at the end the model continues two prompts.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gyrostat
import stdlib_text

PROMPTS = ("def __init__(self", "import os\nimport ")  # of equal length, to make one batch


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each behind a layer-norm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, time, width)))
        y: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


class GPT(nn.Module):
    def __init__(
        self, *, context: int = 64, width: int = 128, layers: int = 2, heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(stdlib_text.VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, stdlib_text.VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def continue_text(model: GPT, tokens: Tensor, count: int) -> Tensor:
    """`tokens` (batch × time) and `count` more, drawn from the predictions, sharpened a little."""
    for _ in range(count):
        logits = model(tokens[:, -model.context :])[:, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(dim=1), 1)], dim=1)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4, help="windows per virtual worker")
    parser.add_argument("--limit", type=int, default=None, help="the most steps per epoch")
    parser.add_argument("--small", action="store_true", help="less text, a smaller model, for tests")
    args = parser.parse_args()

    job = gyrostat.init(seed=7)
    train_text, validation_text = stdlib_text.load(limit=40_000 if args.small else 1_200_000)
    baseline = stdlib_text.unigram_loss(train_text, validation_text)
    model = GPT(context=32, width=32, layers=1) if args.small else GPT()
    model.to(job.device)
    train_set = stdlib_text.Windows(train_text, model.context)
    validation_set = stdlib_text.Windows(validation_text, model.context)
    prompt_tokens = torch.tensor([list(prompt.encode("ascii")) for prompt in PROMPTS])
    train = job.dataloader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    validation = job.dataloader(validation_set, batch_size=16)
    prompts = job.dataloader(TensorDataset(prompt_tokens), batch_size=1)

    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95))
    steps = args.epochs * len(train)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,  # up over 20 steps, then down along a cosine to a tenth
        lambda step: min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1.0))),
    )
    job.track(model=model, optimizer=optimizer, schedule=schedule)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, following = (part.to(job.device) for part in batch)
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

    for _ in job.epochs(args.epochs):
        for step in job.steps(train, limit=args.limit):
            for batch in step:
                loss = loss_of(batch)
                step.backward(loss)
                mean_loss = job.mean(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if job.step % 50 == 0:
                job.log(loss=mean_loss.item())
        total = sum(job.evaluate(validation, lambda batch: float(loss_of(batch)) * len(batch[0])))
        validation_loss = total / len(validation_set)
        job.log(loss=mean_loss.item(), validation_loss=validation_loss, unigram_baseline=baseline)

    texts = job.evaluate(prompts, lambda batch: continue_text(model, batch[0].to(job.device), count=200))
    if job.is_main:
        for text in texts:
            print(f"--- sample\n{stdlib_text.decode(text[0])}")


if __name__ == "__main__":
    main()
