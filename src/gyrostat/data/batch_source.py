"""The micro-batches of the virtual workers of this worker, in the loops over one loader.

A `BatchSource` does for each of its virtual workers what a DataLoader's iterator does for a rank. In a loop:

1. `start` in the streams of a virtual worker draws what `iter(DataLoader)` draws; or `resume` from a position.
2. `fetch` for each micro-batch, in its streams, consumes the batch and takes the next index, as `next()` does.
3. `again` for a later pass over the same micro-batches.
4. `end_loop`, when the loop is exhausted or left.

`position` is the position of a virtual worker at any boundary. In this module batches are made in this process, in the virtual
worker's own streams (`num_workers=0`); in `shared_source.py` data workers make them ahead. All methods run in the script's
thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from gyrostat.core.errors import Misuse
from gyrostat.data import torch_internals
from gyrostat.data.dataset_replica import DatasetReplica, has_state_dict
from gyrostat.data.indices import Indices, RankSampler, SamplerIndices
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.order import EpochOrder
from gyrostat.data.position import DataWorkerState, Position, SamplerState
from gyrostat.data.rng import Streams


class BatchSource(ABC):
    """What both kinds of sources share: positions, samplers, the generator."""

    draws_here = True
    """Whether making a batch draws from the streams in force."""

    def __init__(self, loader: OrderedLoader, ranks: Sequence[int], streams: Streams) -> None:
        self.loader, self.ranks, self._streams = loader, ranks, streams
        self._order: EpochOrder | None = None
        self._accumulate = 1
        self._first_batch = 0
        self._positions: dict[int, Position] = {}
        self._indices: dict[int, Indices] = {}
        self._samplers: dict[int, RankSampler] = {}
        self.started = False
        self.samples = 0
        """Samples fetched in this step, by all virtual workers of this worker."""

    # The loop.

    def begin_loop(
        self,
        order: EpochOrder | None,
        *,
        epoch: int,
        accumulate: int,
        first_batch: int,
        positions: Mapping[int, Position],
    ) -> None:
        """Begin a loop over the steps of an epoch, or resume it at `first_batch`."""
        self._order, self._accumulate, self._first_batch, self.started = order, accumulate, first_batch, False
        default = Position(consumed=first_batch)
        self._positions = {rank: positions.get(rank, default) for rank in self.ranks}
        if self.loader.has_sampler:
            for rank in self.ranks:
                if rank not in self._samplers:
                    self._samplers[rank] = RankSampler(self.loader.sampler_of(rank), self.loader.generator)
                    sampler = self._positions[rank].sampler
                    self._samplers[rank].load_state(None if sampler is None else sampler.replica)
                self._samplers[rank].begin(epoch)

    @property
    def resumes(self) -> bool:
        """Whether the loop continues where another worker, or an earlier run, left it: nothing is drawn at its start."""
        return self._first_batch > 0

    def start(self, rank: int) -> None:
        """Begin an iteration, as `iter(DataLoader)` does on this rank; its streams are in force."""
        position = self._positions[rank]
        with self._generator(rank):
            self._indices[rank] = self._make_indices(rank)
            if position.base_seed is None:
                self._indices[rank].iterate()
                self._update(rank, base_seed=_draw_base_seed(self.loader.generator))
                if self.loader.num_workers > 0:
                    self._indices[rank].iterate()
            else:  # persistent data workers are seeded once
                self._indices[rank].iterate()
        self._update(rank, consumed=0, turn=0)
        self._started(rank)

    def resume(self, rank: int) -> None:
        """Resume from this rank's position. What its sampler draws now it has drawn before, so streams are restored."""
        position = self._positions[rank]
        state = position.sampler
        if state is None:
            self._indices[rank] = self._make_indices(rank)
            self._resumed(rank, [])
            return
        assert state.rng is not None
        now = self._streams.exchange(state.rng)
        generator = self.loader.generator
        untouched = None if generator is None else generator.get_state()
        self._samplers[rank].load_state(state.replica)
        if generator is not None and state.generator is not None:
            generator.set_state(state.generator)
        indices = self._indices[rank] = self._make_indices(rank)
        indices.iterate()
        if not self._persists_from_before(rank):
            _draw_base_seed(generator)
            if self.loader.num_workers > 0:
                indices.iterate()
        taken = []
        for _ in range(state.taken):
            try:
                taken.append(indices.take())
            except StopIteration:
                continue
        self._streams.exchange(now)
        if generator is not None and untouched is not None:
            generator.set_state(untouched)
        # A sampler that draws at every index drew between batches, from streams that had changed: its indices were kept.
        self._resumed(rank, taken[position.consumed :] if state.ahead is None else list(state.ahead))

    @abstractmethod
    def begin_step(self) -> None:
        """Begin a step: the micro-batches of the step before are not needed again."""

    @abstractmethod
    def available(self, rank: int, count: int) -> int:
        """How many of the next `count` micro-batches exist; the rank's streams are in force."""

    @abstractmethod
    def fetch(self, rank: int, number: int) -> Any:
        """The next micro-batch of this rank, which is number `number` of its step; its streams are in force."""

    @abstractmethod
    def again(self, rank: int, number: int) -> Any:
        """The same micro-batch again, for a later pass."""

    @abstractmethod
    def end_loop(self) -> None:
        """The loop is exhausted, or left."""

    def exhaust(self, rank: int) -> None:
        """Draw what a request beyond the last batch draws: a `for` loop over a DataLoader ends with one."""

    # When virtual workers move to another worker.

    looks_ahead = False
    """Whether batches are prefetched, which takes a while for a virtual worker that moves here."""

    def leave_at(self, rank: int, batch: int) -> Position | None:
        """Prepare to move this virtual worker away before micro-batch `batch`. Returns its position there, if known already."""
        return None

    def expect(self, rank: int, position: Position) -> None:
        """Prepare for this virtual worker, which moves here at that position."""

    def call_off(self) -> None:
        """Cancel the moves that were prepared."""

    def rehost(self, ranks: Sequence[int], positions: Mapping[int, Position]) -> bool:
        """Serve these virtual workers from now on; keep batches in flight for those that stay.

        Returns False if that is not possible: then this source has to be replaced.
        """
        return False

    def position(self, rank: int) -> Position:
        """The position of this rank, after the micro-batches it has consumed."""
        position = self._positions[rank]
        if self.started and rank in self._indices and (state := self._indices[rank].state()) is not None:
            position = replace(position, sampler=state)
        return position

    def warm_up(self) -> None:
        """Do what would delay the first batch."""

    def close(self) -> None:
        """End the use of this source."""

    # For both kinds.

    def _started(self, rank: int) -> None:
        """Called when the iteration of this rank has begun."""

    @abstractmethod
    def _resumed(self, rank: int, ahead: list[Any]) -> None:
        """Called when the iteration of this rank resumes. `ahead`: indices that were taken and not consumed."""

    def _persists_from_before(self, rank: int) -> bool:
        """Whether the iteration was begun by persistent data workers, which were seeded before it."""
        return False

    def _update(self, rank: int, **changes: Any) -> None:
        self._positions[rank] = replace(self._positions[rank], **changes)

    def _make_indices(self, rank: int) -> Indices:
        if not self.loader.has_sampler:
            return self.loader.indices(
                self._order, rank, self._positions[rank].consumed if self.resumes else 0
            )
        return SamplerIndices(self._samplers[rank], self.loader.batched, self._streams, self.loader.generator)

    def _next_index(self, rank: int) -> Any:
        """The next index; StopIteration if there is none."""
        if self.loader.has_sampler:
            with self._generator(rank):
                return self._indices[rank].take()
        return self._indices[rank].take()

    @contextmanager
    def _generator(self, rank: int) -> Iterator[None]:
        """Install this virtual worker's state in the loader's generator, of which the script gave one for all."""
        generator = self.loader.generator
        if generator is None:
            yield
            return
        before = generator.get_state()
        state = self._positions[rank].generator
        if state is not None:
            generator.set_state(state)
        try:
            yield
        finally:
            self._update(rank, generator=generator.get_state())
            generator.set_state(before)

    def _after_loop(self, rank: int) -> Position:
        """What remains of a position when the loop is over."""
        sampler = SamplerState(replica=self._samplers[rank].state) if self.loader.has_sampler else None
        return Position(generator=self._positions[rank].generator, sampler=sampler)

    def _pinned(self, batch: Any) -> Any:
        return torch_internals.pinned(batch) if self.loader.pins else batch


class DirectBatchSource(BatchSource):
    """Makes batches in this process, when they are fetched."""

    def __init__(self, loader: OrderedLoader, ranks: Sequence[int], streams: Streams) -> None:
        super().__init__(loader, ranks, streams)
        self._fetchers: dict[int, Any] = {}
        self._replicas: dict[int, DatasetReplica] = {}
        self._peeked: dict[int, Any] = {}
        self._step_indices: dict[tuple[int, int], Any] = {}
        self._kept: dict[tuple[int, int], Any] = {}
        self._ahead: dict[int, tuple[Any, int]] = {}  # with `lookahead`: the next batch
        self._recipe = loader.recipe(ranks)
        self._batch_samples = 0

    def _started(self, rank: int) -> None:
        if self.loader.iterable:
            self._fetchers[rank] = self._fetcher(*self._replicas[rank].parts)
        elif rank not in self._fetchers:
            self._fetchers[rank] = self._fetcher(self._recipe.dataset(rank), self._recipe.collate_fn)

    def _fetcher(self, dataset: Any, collate_fn: Any) -> Any:
        def collate(samples: Any) -> Any:
            self._batch_samples = len(samples) if self._recipe.auto_collation else 1
            return collate_fn(samples)

        return self._recipe.fetcher(dataset, collate)

    def _resumed(self, rank: int, ahead: list[Any]) -> None:
        position = self._positions[rank]
        if not self.loader.iterable:
            self._started(rank)
            if self.loader.lookahead:
                now = self._streams.save()
                if position.ahead is not None:
                    self._streams.exchange(position.ahead)
                self._make_ahead(rank, ahead)
                self._streams.exchange(now)
            return
        state = position.data_workers[0]
        replica = self._replica(rank)
        if has_state_dict(replica.parts[0]):
            replica.load_state(state.replica)
            now = self._streams.save()
            self._started(rank)
        else:
            # The dataset cannot save its position: iterate it from the beginning, and skip what was made before.
            assert state.origin is not None
            now = self._streams.exchange(state.origin[0])
            replica.load_state(state.origin[1])
            self._started(rank)
            for _ in range(position.consumed):
                self._fetchers[rank].fetch(self._recipe.every)
        self._streams.exchange(now)

    def start(self, rank: int) -> None:
        if self.loader.iterable:
            state, began = self._replica(rank).state(), self._streams.save()
            self._update(rank, data_workers={0: DataWorkerState(rng=began, origin=(began, state))})
        super().start(rank)
        self._update(rank, base_seed=None)  # no data worker is seeded with it
        if self.loader.lookahead:
            self._make_ahead(rank, [])

    def _make_ahead(self, rank: int, taken: list[Any]) -> None:
        """Make the next batch, if there is one, in the streams in force. `taken`: its index, if it was taken before."""
        before = self._streams.save()
        self._ahead.pop(rank, None)
        with suppress(StopIteration):
            self._ahead[rank] = self._make(rank, taken[0] if taken else self._next_index(rank))
        drew = any(part is not None for part in self._streams.save(known=before).changed_since(before))
        self._update(rank, ahead=before if drew else None)

    def _replica(self, rank: int) -> DatasetReplica:
        """A rank's own dataset, over all its iterations."""
        if rank not in self._replicas:
            self._replicas[rank] = DatasetReplica(self._recipe.dataset(rank), self._recipe.collate_fn)
            if 0 in (states := self._positions[rank].data_workers):
                self._replicas[rank].load_state(states[0].replica)
        else:
            self._replicas[rank].follow_originals()
        return self._replicas[rank]

    def position(self, rank: int) -> Position:
        position = super().position(rank)
        if self.started and self.loader.iterable and has_state_dict(self._replicas[rank].parts[0]):
            state = replace(position.data_workers[0], replica=self._replicas[rank].state())
            position = replace(position, data_workers={0: state})
        return position

    def begin_step(self) -> None:
        self._step_indices.clear()
        self._kept.clear()
        self.samples = 0

    def available(self, rank: int, count: int) -> int:
        if self.loader.lookahead:
            return int(rank in self._ahead)
        try:
            index = self._next_index(rank)
            self._peeked[rank] = self._make(rank, index) if self.loader.iterable else index
        except StopIteration:
            return 0
        return 1

    def fetch(self, rank: int, number: int) -> Any:
        if self.loader.iterable:
            batch, self._batch_samples = self._peeked.pop(rank)
            self._kept[rank, number] = batch
        elif self.loader.lookahead:
            if rank not in self._ahead:
                raise too_few_batches(rank, self._positions[rank].consumed)
            batch, samples = self._ahead[rank]
            self._kept[rank, number] = batch
            self._make_ahead(rank, [])
            self._batch_samples = samples
        else:
            index = self._peeked.pop(rank) if rank in self._peeked else self._require_index(rank)
            self._step_indices[rank, number] = index
            batch = self._fetchers[rank].fetch(index)
        self.samples += self._batch_samples
        self._update(rank, consumed=self._positions[rank].consumed + 1)
        return self._pinned(batch)

    def again(self, rank: int, number: int) -> Any:
        if self.loader.iterable or self.loader.lookahead:
            return self._pinned(self._kept[rank, number])
        return self._pinned(self._fetchers[rank].fetch(self._step_indices[rank, number]))

    def _make(self, rank: int, index: Any) -> tuple[Any, int]:
        return self._fetchers[rank].fetch(index), self._batch_samples

    def _require_index(self, rank: int) -> Any:
        try:
            return self._next_index(rank)
        except StopIteration:
            raise too_few_batches(rank, self._positions[rank].consumed) from None

    def exhaust(self, rank: int) -> None:
        if self.loader.has_sampler and not self.loader.lookahead:
            with suppress(StopIteration):
                self._next_index(rank)

    def end_loop(self) -> None:
        self.begin_step()
        self._peeked.clear()
        self._ahead.clear()
        if self.started:
            self._positions = {rank: self._after_loop(rank) for rank in self.ranks}
            for rank in self._replicas:
                state = DataWorkerState(rng=self._streams.save(), replica=self._replicas[rank].state())
                self._update(rank, data_workers={0: state})
        self.started = False


def too_few_batches(rank: int, consumed: int) -> Misuse:
    return Misuse(
        f"the sampler of virtual worker {rank} ended after {consumed} batches, fewer than its len(); correct its __len__, "
        "or remove it"
    )


def _draw_base_seed(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
