"""DeepFM (Guo et al. 2017) on click logs from a known model.

    gyrostat run --servers 1 --workers 2 examples/deepfm.py      python examples/deepfm.py

Embeddings are a table on the servers, whose rows are made when an id is first seen; the layers are
the dense part. Workers are asynchronous: any of them, and any server, may come, go or die while it trains. The score is the
expected AUC (`click_logs.py`).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import click_logs
import gyrostat
from gyrostat.optim import Adagrad, Adam, RowAdagrad


class DeepFM(nn.Module):
    """First-order weights, all pairs of embeddings (a factorisation machine), and layers over the same embeddings."""

    def __init__(self, fields: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(fields * width, 64), nn.ReLU(), nn.Linear(64, 1))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, embedded: Tensor, first_order: Tensor) -> Tensor:
        summed = embedded.sum(1)
        pairs = 0.5 * (summed * summed - (embedded * embedded).sum(1)).sum(1)
        deep: Tensor = self.layers(embedded.flatten(1)).squeeze(1)
        return self.bias + first_order.squeeze(1) + pairs + deep


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--staleness", type=int, default=None, help="at most so many steps; default: any")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="fewer impressions and ids, for tests")
    args = parser.parse_args()

    fields, ids, samples = (6, 2_000, 40_000) if args.small else (12, 100_000, 600_000)
    logs = click_logs.generate(samples=samples, fields=fields, ids=ids)

    job = gyrostat.init(seed=args.seed)
    servers = gyrostat.servers(job, staleness=args.staleness)
    first_order = servers.table("first_order", width=1, optimizer=Adagrad(lr=0.05), initial_scale=0.0)
    embeddings = servers.table("embeddings", width=8, optimizer=RowAdagrad(lr=0.05))
    model = DeepFM(fields, embeddings.width)
    servers.track(model=model, optimizer=Adam(lr=0.001))
    test = job.dataloader(logs.test, batch_size=2_000, collate_fn=click_logs.as_is)

    for _ in job.epochs(args.epochs):
        train = job.shards(
            logs.train,
            batch_size=args.batch_size,
            shard_size=8 * args.batch_size,
            collate_fn=click_logs.as_is,
        )
        for step in job.steps(train):
            for batch, clicks in step:
                loss = F.binary_cross_entropy_with_logits(
                    model(embeddings(batch), first_order.bag(batch)), clicks
                )
                step.backward(loss)
        scores = torch.cat(
            job.evaluate(test, lambda batch: model(embeddings(batch[0]), first_order.bag(batch[0])))
        )
        auc = click_logs.expected_auc(scores, logs.test.probabilities)
        job.log(auc=auc, best_possible=logs.best)


if __name__ == "__main__":
    main()
