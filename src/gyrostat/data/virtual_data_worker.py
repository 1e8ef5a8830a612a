"""Data worker j of virtual worker r, in a process that runs several of these in turn.

Each does what torch's own worker does on rank r: one thread; seeds from the base seed; a copy of the dataset;
`worker_init_fn`; then a batch for every index. Between its batches its random streams and the state of its dataset are plain
values: restored before a batch, committed after it. `DataWorker` is the process; `workers.py` is its client.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gyrostat.data import torch_internals
from gyrostat.data.dataset_replica import DatasetReplica, ReplicaState, has_state_dict
from gyrostat.data.position import DataWorkerState
from gyrostat.data.rng import RngState, Streams, seed_all


@dataclass(frozen=True, kw_only=True)
class BatchRecipe:
    """How batches are made: the options that a DataLoader passes to its workers."""

    datasets: Mapping[int | None, Any]
    """By virtual rank; under None the dataset of all ranks that have none of their own."""
    iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    num_workers: int
    worker_init_fn: Callable[[int], None] | RankedInit | None = None
    every: Any = None
    """The index for an iterable dataset."""

    def dataset(self, rank: int | None) -> Any:
        return self.datasets[rank] if rank in self.datasets else self.datasets[None]

    def fetcher(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> Any:
        return torch_internals.make_fetcher(
            dataset,
            iterable=self.iterable,
            auto_collation=self.auto_collation,
            collate_fn=collate_fn,
            drop_last=self.drop_last,
        )


@dataclass(frozen=True, kw_only=True)
class StartDataWorker:
    """How to start a virtual data worker, or its next iteration."""

    base_seed: int
    state: DataWorkerState | None
    """The state to resume from; None: start from the seeds."""
    new_iteration: bool = False
    """Of persistent data workers: the next epoch begins, with the present state."""


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A request for one batch."""

    index: Any
    rank: int | None = None
    worker: int = 0
    start: StartDataWorker | None = None
    at: DataWorkerState | None = None
    """Make the batch again under this state, and restore the present state afterwards."""
    seed: int | None = None
    """Make the batch for an evaluation, under streams of its own with this seed."""


@dataclass(frozen=True, kw_only=True)
class BatchReply:
    """A batch and the state after it; or the end of an iterable dataset; or an error."""

    batch: Any = None
    samples: int = 0
    ended: bool = False
    error: Any = None
    rng: tuple[Any, ...] = ()
    """Streams that changed, and None for those that did not."""
    replica: ReplicaState | None = None
    began: tuple[RngState, ReplicaState | None] | None = None
    """If the virtual data worker was started for this request: its streams and replica before the batch."""


class RankedInit:
    """A `worker_init_fn` that depends on the virtual rank of the data worker's owner."""

    def __init__(self, make: Callable[[int], Callable[[int], None]]) -> None:
        self.of_rank = make


def init_of_rank(init: Any, rank: int) -> Any:
    """The `worker_init_fn` of this rank's data workers."""
    return init.of_rank(rank) if isinstance(init, RankedInit) else init


class VirtualDataWorker:
    """One data worker of one virtual worker."""

    def __init__(self, recipe: BatchRecipe, rank: int, number: int, base_seed: int) -> None:
        self._recipe, self._number, self._seed = recipe, number, base_seed + number
        replica = DatasetReplica(recipe.dataset(rank), recipe.collate_fn, recipe.worker_init_fn)
        self._dataset, self._collate_fn, init = replica.parts
        init = init_of_rank(init, rank)
        self._replica = replica
        self._fetcher: Any = None
        self._broken: Any = None
        self.samples = 0
        random.seed(self._seed)
        torch.manual_seed(self._seed)
        np.random.seed(torch_internals.numpy_seed(base_seed, number))
        self.activate()
        try:
            if init is not None:
                init(number)
        except Exception:
            self._broken = torch_internals.wrap_exception(number)

    def activate(self) -> None:
        """Make `get_worker_info()` describe this one."""
        torch_internals.set_worker_info(self._number, self._recipe.num_workers, self._seed, self._dataset)

    def iterate(self) -> None:
        """Begin an iteration. An iterable dataset makes its iterator now."""
        try:
            self._fetcher = self._recipe.fetcher(self._dataset, self._collate)
        except Exception:
            self._broken = torch_internals.wrap_exception(self._number)

    def resume(self, state: DataWorkerState, streams: Streams, *, new_iteration: bool) -> None:
        """Resume from a state that was committed elsewhere."""
        replays = self._recipe.iterable and not new_iteration and not has_state_dict(self._dataset)
        if replays:
            # The dataset cannot save its position: iterate it from the beginning, and skip what was made before.
            if state.origin is not None:
                streams.exchange(state.origin[0])
                self._replica.load_state(state.origin[1])
            self.iterate()
            for _ in range(state.batches):
                self.fetch(self._recipe.every)
            return
        self._replica.load_state(state.replica)
        if new_iteration:
            streams.exchange(state.rng)
            self.iterate()
        else:
            self.iterate()
            streams.exchange(state.rng)

    def fetch(self, index: Any) -> Any:
        if self._broken is not None:
            broken, self._broken = self._broken, None
            broken.reraise()
        self.samples = 1
        return self._fetcher.fetch(index)

    def replica_state(self) -> ReplicaState | None:
        return self._replica.state()

    def load_replica_state(self, state: ReplicaState | None) -> None:
        self._replica.load_state(state)

    def _collate(self, samples: Any) -> Any:
        if self._recipe.auto_collation:
            self.samples = len(samples)
        return self._collate_fn(samples)


class DataWorker:
    """A process that runs data workers of several virtual workers in turn."""

    def __init__(self, recipe: BatchRecipe) -> None:
        self._recipe = recipe
        self._streams = Streams()
        self._workers: dict[tuple[int, int], VirtualDataWorker] = {}
        self._states: dict[tuple[int, int], RngState] = {}
        self._active: tuple[int, int] | None = None
        """Whose streams are in force."""
        self._evaluating: Any = None

    def reply(self, request: BatchRequest) -> BatchReply:
        """Make the batch that is requested."""
        if request.rank is None:
            return self._evaluate(request)
        key = (request.rank, request.worker)
        if request.start is not None:
            self._start(key, request.start)
        worker = self._activate(key)
        before = self._states[key]
        began = None if request.start is None else (before, worker.replica_state())
        if request.at is not None:
            replica = worker.replica_state()
            self._streams.exchange(request.at.rng)
            worker.load_replica_state(request.at.replica)
            reply = self._fetch(worker, request)
            self._streams.exchange(before)
            worker.load_replica_state(replica)
            return replace(reply, began=began)
        reply = self._fetch(worker, request)
        after = self._states[key] = self._streams.save(known=before)
        return replace(reply, rng=after.changed_since(before), replica=worker.replica_state(), began=began)

    def _start(self, key: tuple[int, int], start: StartDataWorker) -> None:
        self._active = None
        worker = self._workers.get(key)
        if worker is not None and start.new_iteration:
            self._activate(key)
            worker.iterate()
        else:
            worker = self._workers[key] = VirtualDataWorker(self._recipe, *key, start.base_seed)
            if start.state is None:
                worker.iterate()
            else:
                worker.resume(start.state, self._streams, new_iteration=start.new_iteration)
        self._states[key] = self._streams.save()
        self._active = key

    def _activate(self, key: tuple[int, int]) -> VirtualDataWorker:
        """Put the streams of this virtual data worker in force, and make `get_worker_info()` describe it."""
        worker = self._workers[key]
        if self._active != key:
            self._streams.exchange(self._states[key])
            self._active = key
        worker.activate()
        return worker

    def _fetch(self, worker: VirtualDataWorker, request: BatchRequest) -> BatchReply:
        try:
            batch = worker.fetch(request.index)
        except Exception as error:
            if isinstance(error, StopIteration) and self._recipe.iterable:
                return BatchReply(ended=True)
            return BatchReply(error=torch_internals.wrap_exception(request.worker))
        return BatchReply(batch=batch, samples=worker.samples)

    def _evaluate(self, request: BatchRequest) -> BatchReply:
        assert request.seed is not None
        self._active = None
        if self._evaluating is None:
            dataset, collate_fn = DatasetReplica(self._recipe.dataset(None), self._recipe.collate_fn).parts
            self._evaluating = dataset, self._recipe.fetcher(dataset, collate_fn)
        dataset, fetcher = self._evaluating
        torch_internals.set_worker_info(request.worker, self._recipe.num_workers, request.seed, dataset)
        seed_all(request.seed)
        try:
            return BatchReply(batch=fetcher.fetch(request.index))
        except Exception:
            return BatchReply(error=torch_internals.wrap_exception(request.worker))
