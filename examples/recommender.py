"""A two-tower recommender with embeddings, on interactions drawn from the latent model in `interactions.py`.

    gyrostat run --virtual-workers 4 --workers 2 examples/recommender.py

What it shows: embeddings with dense gradients, a loss across the micro-batch (the other users' items are
the wrong answers), and an evaluation whose results are tensors, gathered in the order of the users. The
recall is printed next to that of recommending what is popular, and of ranking by the true affinities,
which no recommender can be expected to beat.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gyrostat
import interactions


class Tower(nn.Module):
    """From the number of a user or an item to its vector."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(count, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, numbers: Tensor) -> Tensor:
        embedded = self.embedding(numbers)
        vector: Tensor = embedded + self.mlp(embedded)
        return vector


class TwoTowers(nn.Module):
    """Scores each of `users` against each of `items`: a matrix of dot products, plus a bias per item."""

    def __init__(self, *, users: int, items: int, width: int = 32) -> None:
        super().__init__()
        self.users = Tower(users, width)
        self.items = Tower(items, width)
        self.bias = nn.Embedding(items, 1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        scores: Tensor = self.users(users) @ self.items(items).T + self.bias(items).T
        return scores


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=256, help="interactions per virtual worker")
    parser.add_argument("--limit", type=int, default=None, help="the most steps per epoch")
    parser.add_argument("--small", action="store_true", help="fewer users and items, for tests")
    args = parser.parse_args()

    job = gyrostat.init(seed=7)
    users, items = (200, 100) if args.small else (2_000, 1_000)
    data = interactions.generate(users=users, items=items)
    popularity = torch.bincount(data.train[:, 1], minlength=items).double()
    log_share = (popularity / popularity.sum()).clamp(min=1e-9).log().float().to(job.device)
    popular = interactions.recall_at_10(popularity.expand(users, items), data.seen, data.held_out)
    possible = interactions.recall_at_10(data.affinity, data.seen, data.held_out)

    model = TwoTowers(users=users, items=items).to(job.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    train = job.dataloader(
        TensorDataset(data.train), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    everyone = TensorDataset(torch.arange(users), data.seen, data.held_out)
    test = job.dataloader(everyone, batch_size=100)
    job.track(model=model, optimizer=optimizer)

    def recall(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        who, seen, held_out = batch
        scores = model(who.to(job.device), torch.arange(items, device=job.device))
        return interactions.recall_at_10(scores.cpu(), seen, held_out)

    for _ in job.epochs(args.epochs):
        for step in job.steps(train, limit=args.limit):
            for (pairs,) in step:
                user, item = pairs.to(job.device).unbind(dim=1)
                # Popular items are wrong answers more often; subtracting their share makes up for it.
                scores = model(user, item) - log_share[item]
                accidental = (item.unsqueeze(0) == item.unsqueeze(1)).fill_diagonal_(False)
                scores = scores.masked_fill(accidental, -torch.inf)
                loss = F.cross_entropy(scores, torch.arange(len(item), device=job.device))
                step.backward(loss)
                mean_loss = job.mean(loss)
            optimizer.step()
            optimizer.zero_grad()
        recalls = torch.cat(job.evaluate(test, recall))
        job.log(
            loss=mean_loss.item(),
            recall_at_10=recalls.mean().item(),
            popularity_baseline=popular.mean().item(),
            true_affinities=possible.mean().item(),
        )


if __name__ == "__main__":
    main()
