"""Data worker j of virtual worker r, within a process that is several of these in turn.

Each does what torch's own worker does on rank r: one thread; seeds from the base seed; a copy of the dataset;
`worker_init_fn`; then a batch for every index. Between its batches its random streams and what its dataset holds are
values: restored before a batch, committed after it. `DataWorker` is the process's side, `workers.py` the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gyrostat.data import torch_internals
from gyrostat.data.dataset_replica import DatasetReplica, Held, offers_state
from gyrostat.data.position import PairState
from gyrostat.data.rng import RngState, Streams, seed_all


@dataclass(frozen=True, kw_only=True)
class BatchRecipe:
    """How batches are made: what a DataLoader tells its workers."""

    datasets: Mapping[int | None, Any]
    """By virtual rank; under None the dataset of all ranks that have none of their own."""
    iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    num_workers: int
    worker_init_fn: Callable[[int], None] | None = None
    every: Any = None
    """The index that an iterable dataset is asked with."""

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
    """How a pair comes into being, or begins anew."""

    base_seed: int
    state: PairState | None
    """What it goes on from; None: from its seeds."""
    new_iteration: bool = False
    """Of persistent data workers: the next epoch begins, with the state they have."""


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """One batch."""

    index: Any
    rank: int | None = None
    worker: int = 0
    start: StartDataWorker | None = None
    at: PairState | None = None
    """Make it once more under this state, and go on as if nothing had been."""
    seed: int | None = None
    """Make it for an evaluation, which has streams of its own."""


@dataclass(frozen=True, kw_only=True)
class BatchReply:
    """A batch and the state after it; or the end of an iterable dataset; or what was raised."""

    batch: Any = None
    samples: int = 0
    ended: bool = False
    error: Any = None
    rng: tuple[Any, ...] = ()
    """Streams that changed, and None for those that did not."""
    held: Held | None = None
    began: tuple[RngState, Held | None] | None = None
    """If the pair was started for this request: its state before the batch."""


class VirtualDataWorker:
    """One data worker of one virtual worker."""

    def __init__(self, recipe: BatchRecipe, rank: int, number: int, base_seed: int) -> None:
        self._recipe, self._number, self._seed = recipe, number, base_seed + number
        replica = DatasetReplica(recipe.dataset(rank), recipe.collate_fn, recipe.worker_init_fn)
        self._dataset, self._collate_fn, init = replica.parts
        self._replica = replica
        self._fetcher: Any = None
        self._broken: Any = None
        self.samples = 0
        random.seed(self._seed)
        torch.manual_seed(self._seed)
        np.random.seed(torch_internals.numpy_seed(base_seed, number))
        self.present()
        try:
            if init is not None:
                init(number)
        except Exception:
            self._broken = torch_internals.wrap_exception(number)

    def present(self) -> None:
        """`get_worker_info()` speaks of this one."""
        torch_internals.be_data_worker(self._number, self._recipe.num_workers, self._seed, self._dataset)

    def iterate(self) -> None:
        """The iteration begins. An iterable dataset makes its iterator now."""
        try:
            self._fetcher = self._recipe.fetcher(self._dataset, self._collate)
        except Exception:
            self._broken = torch_internals.wrap_exception(self._number)

    def go_on(self, state: PairState, streams: Streams, *, new_iteration: bool) -> None:
        """From a state that was committed elsewhere."""
        again = self._recipe.iterable and not new_iteration and not offers_state(self._dataset)
        if again:
            # It cannot say where it is: run it from its beginning, and leave out what was made already.
            if state.origin is not None:
                streams.exchange(state.origin[0])
                self._replica.hold(state.origin[1])
            self.iterate()
            for _ in range(state.batches):
                self.fetch(self._recipe.every)
            return
        self._replica.hold(state.held)
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

    def held(self) -> Held | None:
        return self._replica.held()

    def hold(self, held: Held | None) -> None:
        self._replica.hold(held)

    def _collate(self, samples: Any) -> Any:
        if self._recipe.auto_collation:
            self.samples = len(samples)
        return self._collate_fn(samples)


class DataWorker:
    """A process that stands in for data workers of several virtual workers."""

    def __init__(self, recipe: BatchRecipe) -> None:
        self._recipe = recipe
        self._streams = Streams()
        self._pairs: dict[tuple[int, int], VirtualDataWorker] = {}
        self._states: dict[tuple[int, int], RngState] = {}
        self._in_force: tuple[int, int] | None = None
        self._evaluating: Any = None

    def answer(self, request: BatchRequest) -> BatchReply:
        if request.rank is None:
            return self._evaluate(request)
        key = (request.rank, request.worker)
        if request.start is not None:
            self._start(key, request.start)
        pair = self._enter(key)
        before = self._states[key]
        began = None if request.start is None else (before, pair.held())
        if request.at is not None:
            held = pair.held()
            self._streams.exchange(request.at.rng)
            pair.hold(request.at.held)
            answer = self._fetch(pair, request)
            self._streams.exchange(before)
            pair.hold(held)
            return replace(answer, began=began)
        answer = self._fetch(pair, request)
        after = self._states[key] = self._streams.save(known=before)
        return replace(answer, rng=after.changed_since(before), held=pair.held(), began=began)

    def _start(self, key: tuple[int, int], start: StartDataWorker) -> None:
        self._put_away()
        pair = self._pairs.get(key)
        if pair is not None and start.new_iteration:
            self._enter(key)
            pair.iterate()
        else:
            pair = self._pairs[key] = VirtualDataWorker(self._recipe, *key, start.base_seed)
            if start.state is None:
                pair.iterate()
            else:
                pair.go_on(start.state, self._streams, new_iteration=start.new_iteration)
        self._states[key] = self._streams.save()
        self._in_force = key

    def _enter(self, key: tuple[int, int]) -> VirtualDataWorker:
        """The streams of this pair are in force, and `get_worker_info()` speaks of it."""
        pair = self._pairs[key]
        if self._in_force != key:
            self._streams.exchange(self._states[key])
            self._in_force = key
        pair.present()
        return pair

    def _put_away(self) -> None:
        self._in_force = None

    def _fetch(self, pair: VirtualDataWorker, request: BatchRequest) -> BatchReply:
        try:
            batch = pair.fetch(request.index)
        except Exception as error:
            if isinstance(error, StopIteration) and self._recipe.iterable:
                return BatchReply(ended=True)
            return BatchReply(error=torch_internals.wrap_exception(request.worker))
        return BatchReply(batch=batch, samples=pair.samples)

    def _evaluate(self, request: BatchRequest) -> BatchReply:
        assert request.seed is not None
        self._put_away()
        if self._evaluating is None:
            dataset, collate_fn = DatasetReplica(self._recipe.dataset(None), self._recipe.collate_fn).parts
            self._evaluating = dataset, self._recipe.fetcher(dataset, collate_fn)
        dataset, fetcher = self._evaluating
        torch_internals.be_data_worker(request.worker, self._recipe.num_workers, request.seed, dataset)
        seed_all(request.seed)
        try:
            return BatchReply(batch=fetcher.fetch(request.index))
        except Exception:
            return BatchReply(error=torch_internals.wrap_exception(request.worker))
