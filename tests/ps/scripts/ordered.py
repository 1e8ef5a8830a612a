"""A small model with dropout; prints the digest of its parameters. Arguments: staleness (none, 0, 1 …) and N."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gyrostat
from gyrostat.optim import Adam, RowAdagrad


def main(staleness: str = "0", virtual_workers: str = "4", epochs: str = "2") -> None:
    job = gyrostat.init(seed=7, virtual_workers=int(virtual_workers))
    servers = gyrostat.servers(job, staleness=None if staleness == "none" else int(staleness))
    items = servers.table("items", width=8, optimizer=RowAdagrad(lr=0.05))
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    servers.track(model=model, optimizer=Adam(lr=0.001))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 1000, (2000, 4), generator=generator)
    data = TensorDataset(ids, (ids.sum(1) % 2).float())
    test = job.dataloader(data, batch_size=256)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, y = batch
        return F.binary_cross_entropy_with_logits(model(items(ids).flatten(1)).squeeze(1), y)

    for _ in job.epochs(int(epochs)):
        for step in job.steps(job.shards(data, batch_size=32, shard_size=128)):
            for batch in step:
                step.backward(loss_of(batch))
        losses = job.evaluate(test, lambda batch: loss_of(batch).item())
        job.log(loss=sum(losses) / len(losses))
    print("digest", servers.digest())


if __name__ == "__main__":
    main(*sys.argv[1:])
