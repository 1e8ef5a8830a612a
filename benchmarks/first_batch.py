"""Time to the first mini-batch: eight virtual workers on one worker, against eight DataLoaders of two data workers each.

What EasyScale (§5.1, Fig. 7) measured after a resize: both sides ask for their iterators and take one batch for every
virtual worker. Ours are served by two data workers in all, theirs by sixteen. The dataset is cheap, so that what is
measured is getting there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from figures import Figure, Options, Target, main
from gyrostat.data.options import make_loader
from gyrostat.data.rng import Streams
from gyrostat.data.shared_source import make_batch_source
from pairs import measure_pairs

VIRTUAL_WORKERS = 8
NUM_WORKERS = 2
BATCH_SIZE = 32
TARGET = Target(at_most=0.33)


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return BATCH_SIZE * VIRTUAL_WORKERS * 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3, 32, 32) + index


def ours() -> float:
    loader = make_loader(
        Noise(),
        batch_size=BATCH_SIZE,
        virtual_workers=VIRTUAL_WORKERS,
        shuffle=True,
        num_workers=NUM_WORKERS,
        drop_last=False,
        pad=True,
        pin_memory=False,
        collate_fn=None,
        others={},
    )
    ranks = range(VIRTUAL_WORKERS)
    streams = Streams()
    contexts = {rank: streams.save() for rank in ranks}
    began = time.perf_counter()
    source = make_batch_source(loader, ranks, streams)
    source.begin_loop(loader.order(seed=0, epoch=0), epoch=0, accumulate=1, first_batch=0, positions={})
    for rank in ranks:  # as the engine does: in the streams of each
        outside = streams.exchange(contexts[rank])
        source.start(rank)
        contexts[rank] = streams.exchange(outside)
    source.started = True
    source.begin_step()
    for rank in ranks:
        assert len(source.fetch(rank, 0)) == BATCH_SIZE
    seconds = time.perf_counter() - began
    source.end_loop()
    return seconds * 1000


def theirs() -> float:
    dataset = Noise()
    loaders = [
        DataLoader(
            dataset,
            BATCH_SIZE,
            sampler=DistributedSampler(dataset, VIRTUAL_WORKERS, rank),
            num_workers=NUM_WORKERS,
        )
        for rank in range(VIRTUAL_WORKERS)
    ]
    began = time.perf_counter()
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        assert len(next(iterator)) == BATCH_SIZE
    seconds = time.perf_counter() - began
    del iterators, iterator
    return seconds * 1000


def measure(options: Options) -> Iterable[Figure]:
    torch.set_num_threads(1)
    pairs = measure_pairs(ours, theirs, options.pairs)
    yield Figure(
        name=f"first mini-batch, {VIRTUAL_WORKERS} virtual workers",
        ours=f"{NUM_WORKERS} shared data workers",
        theirs=f"{NUM_WORKERS * VIRTUAL_WORKERS} data workers",
        unit="ms",
        pairs=pairs,
        target=TARGET,
    )


if __name__ == "__main__":
    main(__doc__ or "", measure)
