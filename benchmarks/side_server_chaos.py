"""The job of a chaos run with parameter servers: it counts how often every sample was trained, and fails if one was not trained
exactly once per epoch.

With SGD, a learning rate of 1 and a gradient of -1 per sample, the row of a sample is its count, so that the digest does not
depend on the order of updates either. `side_server_chaos.py EPOCHS [SECONDS_PER_BATCH]`
"""

from __future__ import annotations

import sys
import time

import torch

import gyrostat
from gyrostat.optim import SGD

SAMPLES, BATCH, SHARD = 2_000, 10, 50


def main() -> None:
    epochs, seconds = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.01
    job = gyrostat.init(seed=3)
    servers = gyrostat.servers(job)
    counts = servers.table("counts", width=1, optimizer=SGD(lr=1.0), initial_scale=0.0)
    dataset = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    for _ in job.epochs(epochs):
        for step in job.steps(job.shards(dataset, batch_size=BATCH, shard_size=SHARD)):
            for (ids,) in step:
                time.sleep(seconds)
                step.backward(-counts(ids).sum())
    found = job.evaluate(
        job.dataloader(dataset, batch_size=100), lambda batch: counts(batch[0]).flatten().tolist()
    )
    wrong = [value for values in found for value in values if value != epochs]
    if wrong or sum(map(len, found)) != SAMPLES:
        raise SystemExit(f"{len(wrong)} samples were not trained exactly {epochs} times: {wrong[:10]}")


if __name__ == "__main__":
    main()
