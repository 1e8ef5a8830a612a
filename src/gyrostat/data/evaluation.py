"""Batches for `job.evaluate`: any samples, each batch under streams of its own, in this process or by data workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from gyrostat.core.errors import UsageError
from gyrostat.data import torch_internals
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.rng import seed_all
from gyrostat.data.virtual_data_worker import BatchRequest
from gyrostat.data.workers import DataWorkerPool, Task


def check_evaluable(loader: OrderedLoader) -> None:
    """An evaluation sees every sample once, in dataset order: it must be able to ask for them."""
    if loader.iterable or loader.per_rank:
        raise UsageError(
            "job.evaluate needs one map-style dataset for all, whose samples it can share out; this loader's dataset is "
            f"{'made per rank' if loader.per_rank else 'iterable'}"
        )


def batches(loader: OrderedLoader, wanted: Sequence[tuple[int, int, list[int]]]) -> Iterator[Any]:
    """For every (number, seed, samples) the batch of these samples, made with all streams seeded with `seed`.

    The data worker that makes batch j calls itself j mod `num_workers`, whichever process it is.
    """
    if loader.num_workers == 0:
        for _, seed, samples in wanted:
            seed_all(seed)
            yield loader.fetch(samples)
        return
    workers = DataWorkerPool(loader.recipe(()), context=loader.context, timeout=loader.timeout)
    try:
        left = deque(enumerate(wanted))
        under_way: deque[Task] = deque()
        while left or under_way:
            while left and len(under_way) < loader.prefetch_factor * loader.num_workers:
                place, (number, seed, samples) = left.popleft()
                index = samples if loader.auto_collation else samples[0]
                request = BatchRequest(index=index, worker=number % loader.num_workers, seed=seed)
                task = Task(process=place % loader.num_workers, request=partial(_ask, request))
                workers.submit(task)
                under_way.append(task)
            answer = workers.wait(under_way.popleft())
            if answer.error is not None:
                answer.error.reraise()
            yield torch_internals.pinned(answer.batch) if loader.pins else answer.batch
    finally:
        workers.close()


def _ask(request: BatchRequest, unknown: bool) -> BatchRequest:
    return request
