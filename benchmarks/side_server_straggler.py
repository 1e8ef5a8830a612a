"""The job of `server_straggler.py`: batches that take a fixed time, on rows of a table that are on servers.

`side_server_straggler.py SAMPLES SECONDS_PER_BATCH SLOW`: worker 0 takes SLOW times as long.
"""

from __future__ import annotations

import os
import sys
import time

import torch

import gyrostat
from gyrostat.optim import RowAdagrad

BATCH, ROWS = 32, 50_000


def main() -> None:
    samples, seconds, slow = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    if os.environ["RANK"] == "0":
        seconds *= slow
    job = gyrostat.init(seed=5)
    servers = gyrostat.servers(job)
    items = servers.table("items", width=16, optimizer=RowAdagrad(lr=0.05))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, ROWS, (samples, 8), generator=generator)
    dataset = torch.utils.data.TensorDataset(ids)
    for _ in job.epochs(1):
        for step in job.steps(job.shards(dataset, batch_size=BATCH, shard_size=BATCH)):
            for (batch,) in step:
                time.sleep(seconds)
                step.backward(items(batch).pow(2).mean())


if __name__ == "__main__":
    main()
