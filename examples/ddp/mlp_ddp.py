"""The plain DDP form of `examples/mlp.py`: the program that a gyrostat job is equal to, bit for bit.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/ddp/mlp_ddp.py

It prints `gyrostat.digest` of model, optimizer and schedule at the end. It is also in `report.json` after

    gyrostat run --virtual-workers 4 --workers 2 --report report.json examples/mlp.py

and after the same job on 1, 3 or 4 workers. `docs/howto/from-ddp.md` goes from one to the other, line by line.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

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


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@torch.no_grad()
def count_correct(model: nn.Module, test_set: TensorDataset, batch_size: int) -> int:
    """Without a DataLoader: its iterator would draw from the random stream that training goes on with."""
    model.eval()
    correct = 0
    for start in range(0, len(test_set), batch_size):
        x, y = test_set[start : start + batch_size]
        correct += int((model(x).argmax(dim=1) == y).sum())
    model.train()
    return correct


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--limit", type=int, default=None, help="the most steps per epoch")
    parser.add_argument("--small", action="store_true", help="a narrower network, for tests")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    seed_everything(SEED)  # all ranks alike: the same initial parameters
    train_set, test_set = digits()
    model = build_model(width=32 if args.small else 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, shuffle=True, seed=SEED)
    train = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    seed_everything(SEED + rank)  # from here on each rank its own: different dropout
    ddp_model = DistributedDataParallel(model)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(train):
            if number == args.limit:
                break
            loss = F.cross_entropy(ddp_model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        if rank == 0:
            accuracy = count_correct(model, test_set, batch_size=64) / len(test_set)
            print(f"epoch {epoch}  loss {mean_loss.item() / world_size:.6g}  accuracy {accuracy:.6g}")

    if rank == 0:
        print(f"digest {gyrostat.digest(model=model, optimizer=optimizer, schedule=schedule)}")
    dist.barrier()  # nobody tears down its connections while others still use them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
