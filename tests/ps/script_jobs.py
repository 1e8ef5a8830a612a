"""Jobs with servers in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gyrostat
from gyrostat.engine.script import session
from gyrostat.engine.script.job import Job
from gyrostat.optim import Adam, RowAdagrad

SAMPLES, FIELDS, IDS = 300, 3, 50


@contextmanager
def fresh_job(
    *, seed: int = 7, virtual_workers: int = 1, checkpoint_dir: Path | None = None
) -> Iterator[Job]:
    """This process's job, ended without a report."""
    try:
        yield gyrostat.init(seed=seed, virtual_workers=virtual_workers, checkpoint_dir=checkpoint_dir)
    finally:
        built, session._Process.built = session._Process.built, None
        if built is not None:
            loops: Any = built.job.loops
            stop = loops._stop_refusing if hasattr(loops, "_stop_refusing") else loops._hook.remove
            stop()


def clicks(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, IDS, (samples, FIELDS), generator=generator)
    return TensorDataset(ids, (ids.sum(1) % 2).float())


@dataclass
class Trained:
    digest: str
    losses: list[float] = field(default_factory=list)
    seen: list[tuple[int, int]] = field(default_factory=list)
    """Epoch and number of every batch."""
    steps: list[int] = field(default_factory=list)
    """`job.step` after every epoch."""
    evaluations: list[float] = field(default_factory=list)


def train(
    staleness: int | None,
    virtual_workers: int = 1,
    *,
    epochs: int = 2,
    dropout: float = 0.2,
    batch_size: int = 32,
    checkpoint_dir: Path | None = None,
    stop_after: int | None = None,
) -> Trained:
    """A small model, from beginning to end; or killed after so many batches, the last of which is trained and not reported."""
    with fresh_job(virtual_workers=virtual_workers, checkpoint_dir=checkpoint_dir) as job:
        servers = gyrostat.servers(job, staleness=staleness)
        items = servers.table("items", width=4, optimizer=RowAdagrad(lr=0.05))
        model = nn.Sequential(nn.Linear(4 * FIELDS, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
        servers.track(model=model, optimizer=Adam(lr=0.01))
        data = clicks()
        test = job.dataloader(data, batch_size=50)

        def score(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
            ids, y = batch
            return F.binary_cross_entropy_with_logits(model(items(ids).flatten(1)).squeeze(1), y).item()

        trained = Trained("")
        for _ in job.epochs(epochs):
            for step in job.steps(job.shards(data, batch_size=batch_size, shard_size=4 * batch_size)):
                for ids, y in step:
                    loss = F.binary_cross_entropy_with_logits(model(items(ids).flatten(1)).squeeze(1), y)
                    step.backward(loss)
                    trained.losses.append(loss.item())
                    trained.seen.append((job.epoch, step.number))
                if len(trained.seen) == stop_after:
                    return trained
                if checkpoint_dir is not None and len(trained.seen) % 3 == 0:
                    job.save()
            trained.steps.append(job.step)
            scores = job.evaluate(test, score)
            trained.evaluations.append(sum(scores) / len(scores))
        trained.digest = servers.digest()
    return trained
