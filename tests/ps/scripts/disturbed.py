"""Asynchronous training that is disturbed once: one worker kills itself, and all wait in the middle until a file exists.

Arguments: a directory. `middle` is written there when the job has reached its middle; it goes on when `go` exists."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gyrostat
from gyrostat.optim import Adam, RowAdagrad

SAMPLES, BATCH = 3200, 32


def disturb(directory: Path, batch: tuple[int, int]) -> None:
    if batch == (0, 20) and not (directory / "killed").exists():
        (directory / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if batch == (1, 50):
        (directory / "middle").touch()
        while not (directory / "go").exists():
            time.sleep(0.01)


def main(directory: Path | None) -> None:
    job = gyrostat.init(seed=7)
    servers = gyrostat.servers(job)
    items = servers.table("items", width=8, optimizer=RowAdagrad(lr=0.05))
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    servers.track(model=model, optimizer=Adam(lr=0.001))
    ids = torch.randint(0, 500, (SAMPLES, 4), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(ids, (ids.sum(1) % 2).float())
    for _ in job.epochs(2):
        for step in job.steps(job.shards(data, batch_size=BATCH, shard_size=4 * BATCH)):
            for these, y in step:
                if directory is not None:
                    disturb(directory, (job.epoch, step.number))
                logits = model(items(these).flatten(1)).squeeze(1)
                step.backward(F.binary_cross_entropy_with_logits(logits, y))
    print("digest", servers.digest())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
