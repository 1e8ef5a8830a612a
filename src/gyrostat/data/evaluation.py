"""Batches for `job.evaluate`: given samples, each batch under streams of its own, made in this process or by data workers."""

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
    """Raise if the dataset cannot be indexed: an evaluation reads every sample once, in dataset order."""
    if loader.iterable or loader.per_rank:
        raise UsageError(
            "job.evaluate needs one map-style dataset, whose samples it divides among workers; this loader's dataset is "
            f"{'made per rank' if loader.per_rank else 'iterable'}"
        )


def batches(loader: OrderedLoader, wanted: Sequence[tuple[int, int, list[int]]]) -> Iterator[Any]:
    """For every (number, seed, samples) the batch of these samples, made with all streams seeded with `seed`.

    `get_worker_info()` says data worker j mod `num_workers` for batch j, in any process.
    """
    if loader.num_workers == 0:
        for _, seed, samples in wanted:
            seed_all(seed)
            yield loader.fetch(samples)
        return
    workers = DataWorkerPool(loader.recipe(()), context=loader.context, timeout=loader.timeout)
    try:
        left = deque(enumerate(wanted))
        in_flight: deque[Task] = deque()
        while left or in_flight:
            while left and len(in_flight) < loader.prefetch_factor * loader.num_workers:
                place, (number, seed, samples) = left.popleft()
                index = samples if loader.auto_collation else samples[0]
                request = BatchRequest(index=index, worker=number % loader.num_workers, seed=seed)
                task = Task(process=place % loader.num_workers, request=partial(_same, request))
                workers.submit(task)
                in_flight.append(task)
            reply = workers.wait(in_flight.popleft())
            if reply.error is not None:
                reply.error.reraise()
            yield torch_internals.pinned(reply.batch) if loader.pins else reply.batch
    finally:
        workers.close()


def _same(request: BatchRequest, unknown: bool) -> BatchRequest:
    """For `Task.request`: an evaluation needs no start."""
    return request
