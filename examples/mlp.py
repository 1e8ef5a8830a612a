"""A multilayer perceptron with dropout on scikit-learn's digits: the whole surface in one short file.

    gyrostat run --virtual-workers 4 --workers 2 examples/mlp.py

Reaches 97 % on the held-out fifth of the digits, in seconds. `examples/ddp/mlp_ddp.py` is the
same program for plain DDP; with 4 processes it ends with the same digest, bit for bit.
`docs/howto/from-ddp.md` puts the two side by side.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gyrostat

SEED = 7


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8×8 pixels, scaled to 0 … 1. Every fifth is held out."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    held_out = torch.arange(len(x)) % 5 == 4
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def build_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(width, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="per virtual worker")
    parser.add_argument("--limit", type=int, default=None, help="the most steps per epoch")
    parser.add_argument("--small", action="store_true", help="a narrower network, for tests")
    args = parser.parse_args()

    job = gyrostat.init(seed=SEED)
    train_set, test_set = digits()
    model = build_model(width=32 if args.small else 128).to(job.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    train = job.dataloader(train_set, batch_size=args.batch_size, shuffle=True)
    test = job.dataloader(test_set, batch_size=64)
    job.track(model=model, optimizer=optimizer, schedule=schedule)

    def count_correct(batch: tuple[Tensor, Tensor]) -> int:
        x, y = (part.to(job.device) for part in batch)
        return int((model(x).argmax(dim=1) == y).sum())

    for _ in job.epochs(args.epochs):
        for step in job.steps(train, limit=args.limit):
            for x, y in step:  # one micro-batch per virtual worker that lives here
                loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
                step.backward(loss)
                mean_loss = job.mean(loss)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        accuracy = sum(job.evaluate(test, count_correct)) / len(test_set)
        job.log(loss=mean_loss.item(), accuracy=accuracy)


if __name__ == "__main__":
    main()
