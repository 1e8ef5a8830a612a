"""Wide & Deep (Cheng et al. 2016) on click logs from a known model.

    gyrostat run --servers 1 --workers 2 examples/wide_and_deep.py      python examples/wide_and_deep.py

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
from gyrostat.optim import FTRL, Adam, RowAdagrad


class Deep(nn.Module):
    """The layers over the embeddings of all fields. The wide part is a sum of weights by id, trained by FTRL."""

    def __init__(self, fields: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(fields * width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, embedded: Tensor, wide: Tensor) -> Tensor:
        logits: Tensor = self.layers(embedded.flatten(1)).squeeze(1) + wide.squeeze(1)
        return logits


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
    wide = servers.table("wide", width=1, optimizer=FTRL(lr=0.1, l1=1e-4), initial_scale=0.0)
    embeddings = servers.table("embeddings", width=8, optimizer=RowAdagrad(lr=0.05))
    model = Deep(fields, embeddings.width)
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
                loss = F.binary_cross_entropy_with_logits(model(embeddings(batch), wide.bag(batch)), clicks)
                step.backward(loss)
        scores = torch.cat(job.evaluate(test, lambda batch: model(embeddings(batch[0]), wide.bag(batch[0]))))
        auc = click_logs.expected_auc(scores, logs.test.probabilities)
        job.log(auc=auc, best_possible=logs.best)


if __name__ == "__main__":
    main()
