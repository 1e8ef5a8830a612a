"""xDeepFM (Lian et al. 2018) on click logs from a known model.

    gyrostat run --servers 1 --workers 2 examples/xdeepfm.py      python examples/xdeepfm.py

Embeddings are a table on the servers, whose rows are made when an id is first seen; the rest is
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
from gyrostat.optim import FTRL, Adam


class XDeepFM(nn.Module):
    """A linear part, a compressed interaction network over the embeddings, and layers over them."""

    def __init__(self, fields: int, width: int, maps: tuple[int, ...] = (16, 16)) -> None:
        super().__init__()
        self.filters = nn.ModuleList()
        before = fields
        for after in maps:
            self.filters.append(nn.Conv1d(fields * before, after, 1))
            before = after
        self.pooled = nn.Linear(sum(maps), 1)
        self.layers = nn.Sequential(nn.Linear(fields * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, embedded: Tensor, linear: Tensor) -> Tensor:
        hidden, sums = embedded, []
        for each in self.filters:
            # All products of a field with a map of the layer before, element by element of the embedding.
            products = torch.einsum("bfd,bhd->bfhd", embedded, hidden).flatten(1, 2)
            hidden = torch.relu(each(products))
            sums.append(hidden.sum(2))
        crossed: Tensor = self.pooled(torch.cat(sums, 1)).squeeze(1)
        deep: Tensor = self.layers(embedded.flatten(1)).squeeze(1)
        return linear.squeeze(1) + crossed + deep


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
    linear = servers.table("linear", width=1, optimizer=FTRL(lr=0.1), initial_scale=0.0)
    embeddings = servers.table("embeddings", width=8, optimizer=Adam(lr=0.003))
    model = XDeepFM(fields, embeddings.width)
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
                loss = F.binary_cross_entropy_with_logits(model(embeddings(batch), linear.bag(batch)), clicks)
                step.backward(loss)
        scores = torch.cat(
            job.evaluate(test, lambda batch: model(embeddings(batch[0]), linear.bag(batch[0])))
        )
        auc = click_logs.expected_auc(scores, logs.test.probabilities)
        job.log(auc=auc, best_possible=logs.best)


if __name__ == "__main__":
    main()
