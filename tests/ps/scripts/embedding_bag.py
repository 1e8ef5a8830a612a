"""Bags of ids and a linear layer, twice: with servers, and as plain DDP with `nn.EmbeddingBag` (when started with a store).

    gyrostat run --servers 2 --workers 2 embedding_bag.py        python embedding_bag.py
    python embedding_bag.py STORE RANK                           of two DDP processes

SGD with a learning rate of a power of two, and two virtual workers: every operation between gradients and parameters is exact
or a single rounding, in both forms. Prints a digest of all rows and weights.
"""

from __future__ import annotations

import os
import sys
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import gyrostat
from gyrostat.optim import SGD
from gyrostat.ps.store.hashing import keys_of
from gyrostat.ps.store.spec import TableSpec

IDS, WIDTH, BATCH, BATCHES, EPOCHS, RATE = 40, 6, 16, 12, 2, 2.0**-4


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, IDS, (BATCH * BATCHES, 5), generator=generator)
    return ids, torch.rand(BATCH * BATCHES, generator=generator).round()


def head() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(WIDTH, 1)


def show(rows: Tensor, layer: nn.Module) -> None:
    parts = [rows, *(each.detach() for each in layer.parameters())]
    print("weights", sha256(b"".join(each.contiguous().numpy().tobytes() for each in parts)).hexdigest())


def with_servers() -> None:
    job = gyrostat.init(seed=11, virtual_workers=2)
    servers = gyrostat.servers(job, staleness=0)
    items = servers.table("items", width=WIDTH, optimizer=SGD(lr=RATE))
    layer = head()
    servers.track(layer=layer, optimizer=SGD(lr=RATE))
    train = TensorDataset(*data())
    for _ in job.epochs(EPOCHS):
        for step in job.steps(job.shards(train, batch_size=BATCH, shard_size=BATCH, shuffle=False)):
            for ids, y in step:
                logits = layer(items.bag(ids)).squeeze(1)
                step.backward(F.binary_cross_entropy_with_logits(logits, y))
    every = job.dataloader(TensorDataset(torch.arange(IDS)), batch_size=IDS)
    (rows,) = job.evaluate(every, lambda batch: items(batch[0]))
    show(rows, layer)


def with_ddp(store: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    spec = TableSpec(name="items", width=WIDTH, optimizer=SGD(lr=RATE), seed=11)
    bag = nn.EmbeddingBag(IDS, WIDTH, mode="sum")
    with torch.no_grad():
        bag.weight.copy_(torch.from_numpy(spec.initial(keys_of(torch.arange(IDS).numpy(), "items"))))
    model = nn.Sequential(bag, head())
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ids, y = data()
    for _ in range(EPOCHS):
        for batch in range(rank, BATCHES, 2):
            these = slice(batch * BATCH, (batch + 1) * BATCH)
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(parallel(ids[these]).squeeze(1), y[these])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    show(bag.weight.detach(), model[1])
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        0
    )  # threads of gloo that still run abort an interpreter that ends: torch's, and after the result


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with_ddp(sys.argv[1], int(sys.argv[2]))
    else:
        with_servers()
