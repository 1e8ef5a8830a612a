"""Small training scripts that use every feature of a DataLoader. Run as `batch_sources.py CASE [KEY=VALUE…]`.

Like `zoo.py`, for data: every sample draws from torch, NumPy and `random`, and everything a sample is made of reaches the
loss, so a single wrong draw anywhere changes the digest.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import gyrostat

CASES: dict[str, Callable[[gyrostat.Job, dict[str, Any]], None]] = {}


def case(function: Callable[[gyrostat.Job, dict[str, Any]], None]) -> Callable[..., None]:
    CASES[function.__name__] = function
    return function


def draw(x: torch.Tensor) -> torch.Tensor:
    """Draws from all three sources, normals included: two of them come in pairs, of which one is kept for later."""
    noise = torch.randn(4) + torch.randn(()) + np.random.normal() + np.random.rand() + random.gauss(0, 1)
    info = get_worker_info()
    return x + 0.1 * noise + (0 if info is None else 0.01 * (info.id + info.seed % 1000 + info.num_workers))


class Noisy(Dataset[torch.Tensor]):
    def __init__(self, samples: int = 26) -> None:
        self.x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return draw(self.x[index])


class Remembering(Noisy):
    """Keeps generators and counters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.numpy = np.random.default_rng(6)
        self.parts = [random.Random(7)]
        self.seen = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen += 1
        own = torch.rand((), generator=self.generator) + self.numpy.normal() + self.parts[0].random()
        return super().__getitem__(index) + own + 0.1 * self.seen


class Stream(IterableDataset[torch.Tensor]):
    """Shared out among data workers by `get_worker_info()`; those that come later have less."""

    def __init__(self, samples: int = 46) -> None:
        self.samples = samples

    def numbers(self) -> Iterator[int]:
        info = get_worker_info()
        return (
            iter(range(self.samples))
            if info is None
            else iter(range(info.id, self.samples, info.num_workers))
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[torch.Tensor] = []  # a shuffle buffer: what comes depends on earlier draws
        for number in self.numbers():
            buffer.append(draw(torch.full((4,), number / 10)))
            if len(buffer) == 3:
                yield buffer.pop(int(torch.randint(3, ())))
        yield from buffer


class Resumable(IterableDataset[torch.Tensor]):
    """Can say where it is."""

    def __init__(self) -> None:
        self.next = 0
        self.opened = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        step, first = (1, 0) if info is None else (info.num_workers, info.id)
        while first + self.next * step < 46:
            number = first + self.next * step
            self.next += 1
            yield draw(torch.full((4,), number / 10))
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    batch: torch.Tensor = default_collate(samples)
    return batch * (1 + 0.01 * torch.rand(()) + 0.01 * random.random())


def initialise(worker: int) -> None:
    random.seed(random.random() + worker)
    info = get_worker_info()
    assert info is not None
    info.dataset.shift = 0.5 * worker + torch.rand(()).item()  # type: ignore[attr-defined]


class Shifted(Noisy):
    shift = 0.0

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.shift


def train(
    job: gyrostat.Job, loader: Any, *, epochs: int = 2, passes: int = 1, stop: int | None = None, **steps: Any
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job.track(model=model, optimizer=optimizer)
    for _ in job.epochs(epochs):
        for step in job.steps(loader, **steps):
            for number in range(passes):
                for x in step:
                    x = x.view(-1, 4)
                    step.backward(F.mse_loss(model(x), x.sum(1, keepdim=True)) * (number + 1))
                optimizer.step()
                optimizer.zero_grad()
            if stop is not None and step.number + 1 == stop:
                break


@case
def plain(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Noisy(), batch_size=3, shuffle=True, collate_fn=collate, **options))


@case
def accumulated(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Noisy(), batch_size=2, shuffle=True, **options), accumulate=2)


@case
def two_passes(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Remembering(), batch_size=3, shuffle=True, **options), passes=2)


@case
def initialised(job: gyrostat.Job, options: dict[str, Any]) -> None:
    loader = job.dataloader(Shifted(), batch_size=3, shuffle=True, worker_init_fn=initialise, **options)
    train(job, loader)


@case
def remembering(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Remembering(), batch_size=3, shuffle=True, drop_last=True, **options))


@case
def left_early(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Noisy(), batch_size=2, shuffle=True, **options), epochs=3, stop=2)


@case
def several_loaders(job: gyrostat.Job, options: dict[str, Any]) -> None:
    """Two loaders in turn that share a generator, both cut short, and an evaluation in between."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job.track(model=model, optimizer=optimizer)
    own = torch.Generator().manual_seed(3)
    first = job.dataloader(Noisy(), batch_size=2, shuffle=True, generator=own, **options)
    second = job.dataloader(Noisy(19), batch_size=2, generator=own, **options)
    for _ in job.epochs(2):
        for loader in (first, second):
            for step in job.steps(loader, limit=3):
                for x in step:
                    step.backward(F.mse_loss(model(x), x.sum(1, keepdim=True)))
                optimizer.step()
                optimizer.zero_grad()
        scores = job.evaluate(second, lambda x: float(model(x).sum()))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 + 0.001 * abs(sum(scores)) % 0.01


@case
def generator(job: gyrostat.Job, options: dict[str, Any]) -> None:
    own = torch.Generator().manual_seed(9)
    train(job, job.dataloader(Noisy(), batch_size=3, shuffle=True, generator=own, **options))


@case
def random_sampler(job: gyrostat.Job, options: dict[str, Any]) -> None:
    dataset = Noisy()
    train(job, job.dataloader(dataset, batch_size=4, sampler=RandomSampler(dataset), **options))


@case
def sampler_and_generator(job: gyrostat.Job, options: dict[str, Any]) -> None:
    """The loader and its sampler draw from one generator, as with DataLoader(shuffle=True, generator=g)."""
    dataset, own = Noisy(), torch.Generator().manual_seed(9)
    sampler = RandomSampler(dataset, generator=own)
    train(job, job.dataloader(dataset, batch_size=4, sampler=sampler, generator=own, **options))


@case
def sampler_with_a_generator_of_its_own(job: gyrostat.Job, options: dict[str, Any]) -> None:
    dataset = Noisy()
    sampler = WeightedRandomSampler(
        torch.arange(1.0, 27).tolist(), 20, generator=torch.Generator().manual_seed(2)
    )
    train(job, job.dataloader(dataset, batch_size=3, sampler=sampler, **options))


class PerRank:
    """A sampler that knows its rank, its epoch, and no length; it draws whenever it is asked."""

    def __init__(self, rank: int) -> None:
        self.rank, self.epoch = rank, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(5):
            yield [(number * 3 + self.rank + self.epoch) % 26, int(torch.randint(26, ()))]


@case
def batch_sampler_per_rank(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Noisy(), batch_sampler=PerRank, **options))


class DrawsAlways:
    """Draws at every index, between the draws of the model."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        for _ in range(len(self)):
            yield (int(torch.randint(26, ()).item()) + random.randrange(26) + self.begun) % 26

    def __len__(self) -> int:
        return 20


@case
def sampler_that_draws_always(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Noisy(), batch_size=3, sampler=DrawsAlways(), **options))


@case
def batch_sampler(job: gyrostat.Job, options: dict[str, Any]) -> None:
    dataset = Noisy()
    sampler = BatchSampler(RandomSampler(dataset), 4, drop_last=False)
    train(job, job.dataloader(dataset, batch_sampler=sampler, **options))


@case
def unbatched(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Noisy(11), batch_size=None, shuffle=True, **options))


@case
def stream(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Stream(), batch_size=2, **options))


@case
def stream_per_rank(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(lambda rank: Stream(18), batch_size=4, drop_last=True, **options))


@case
def resumable(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Resumable(), batch_size=2, **options))


class Own(Noisy):
    """The samples of one rank; not equally many on all."""

    def __init__(self, rank: int) -> None:
        super().__init__(11 + rank)
        self.x = self.x + 10 * rank


@case
def own_dataset(job: gyrostat.Job, options: dict[str, Any]) -> None:
    """DataLoader(Own(rank), …): nothing is divided."""
    train(job, job.dataloader(Own, batch_size=3, drop_last=True, **options))


@case
def own_dataset_shuffled(job: gyrostat.Job, options: dict[str, Any]) -> None:
    train(job, job.dataloader(Own, batch_size=3, shuffle=True, **options))


if __name__ == "__main__":
    given = dict(argument.split("=") for argument in sys.argv[2:])
    options = {key: int(value) if value.isdigit() else value for key, value in given.items()}
    CASES[sys.argv[1]](gyrostat.init(seed=11), options)
