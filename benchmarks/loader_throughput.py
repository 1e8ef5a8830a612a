"""Samples per second of `job.dataloader` against torch's DataLoader: a decode-heavy transform, two data workers each.

A sample is decompressed, cropped, flipped and normalised: what decoding a small image costs, with the libraries that are
there. Nothing is trained: the loop consumes batches as fast as they come, on our side with one virtual worker, through the
same batch source that `job.steps` uses. Each measurement is one epoch, from asking for the iterator to the last batch. Beside
it the CPU time that both sides, with their data workers, need per sample: others on the machine disturb that less.
"""

from __future__ import annotations

import random
import resource
import time
import zlib
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from figures import Figure, Options, Target, main
from gyrostat.data.options import make_loader
from gyrostat.data.rng import Streams
from gyrostat.data.shared_source import make_batch_source
from pairs import Pair, measure_pairs

BATCH_SIZE = 16
NUM_WORKERS = 2
BATCHES = 40
SIDE = 160
CROP = 128
TARGET = Target(at_least=1.0)


class Decoding(Dataset[tuple[torch.Tensor, int]]):
    """Compressed images of noise on a gradient, augmented with draws from `random` and torch."""

    def __init__(self, samples: int, kept: int = 64) -> None:
        noise = np.random.default_rng(1)
        ramp = np.arange(SIDE * SIDE * 3, dtype=np.uint32).reshape(SIDE, SIDE, 3) // 301
        self.samples = samples
        self.files = [
            zlib.compress((ramp + noise.integers(0, 16, ramp.shape)).astype(np.uint8).tobytes(), 6)
            for _ in range(kept)
        ]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raw = bytearray(zlib.decompress(self.files[index % len(self.files)]))
        image = torch.frombuffer(raw, dtype=torch.uint8).view(SIDE, SIDE, 3)
        top, left = random.randrange(SIDE - CROP), random.randrange(SIDE - CROP)
        image = image[top : top + CROP, left : left + CROP].permute(2, 0, 1).float() / 255
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image - image.mean((1, 2), keepdim=True)) / image.std((1, 2), keepdim=True), index


def ours(dataset: Decoding) -> float:
    loader = make_loader(
        dataset,
        batch_size=BATCH_SIZE,
        virtual_workers=1,
        shuffle=True,
        num_workers=NUM_WORKERS,
        drop_last=False,
        pad=True,
        pin_memory=False,
        collate_fn=None,
        others={},
    )
    began = time.perf_counter()
    source = make_batch_source(loader, [0], Streams())
    order = loader.order(seed=0, epoch=0)
    source.begin_loop(order, epoch=0, accumulate=1, first_batch=0, positions={})
    source.start(0)
    source.started = True
    seen = 0
    for _ in range(order.batches):
        source.begin_step()
        images, _ = source.fetch(0, 0)
        seen += len(images)
    seconds = time.perf_counter() - began
    source.end_loop()
    assert seen == len(dataset)
    return seen / seconds


def theirs(dataset: Decoding) -> float:
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS)
    began = time.perf_counter()
    seen = sum(len(images) for images, _ in loader)
    seconds = time.perf_counter() - began
    assert seen == len(dataset)
    return seen / seconds


def cpu_seconds() -> float:
    """Of this process and of all data workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def with_cpu(side: Callable[[Decoding], float], dataset: Decoding, spent: list[float]) -> Callable[[], float]:
    def run() -> float:
        before = cpu_seconds()
        throughput = side(dataset)
        spent.append((cpu_seconds() - before) / len(dataset) * 1e3)
        return throughput

    return run


def measure(options: Options) -> Iterable[Figure]:
    torch.set_num_threads(1)
    dataset = Decoding(BATCH_SIZE * (BATCHES if options.pairs > 3 else BATCHES // 4))
    our_cpu: list[float] = []
    their_cpu: list[float] = []
    pairs = measure_pairs(
        with_cpu(ours, dataset, our_cpu), with_cpu(theirs, dataset, their_cpu), options.pairs
    )
    yield Figure(
        name=f"loader throughput, decode-heavy, num_workers={NUM_WORKERS}",
        ours="gyrostat",
        theirs="DataLoader",
        unit="samples/s",
        pairs=pairs,
        target=TARGET,
    )
    yield Figure(
        name="the same, CPU time per sample",
        ours="gyrostat",
        theirs="DataLoader",
        unit="ms",
        pairs=[Pair(mine, other) for mine, other in zip(our_cpu, their_cpu, strict=True)],
    )


if __name__ == "__main__":
    main(__doc__ or "", measure)
