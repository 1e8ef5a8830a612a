"""The micro-batches of the virtual workers that live here, in the loops over one loader.

A `BatchSource` is to the virtual workers of a worker what a DataLoader's iterator is to a rank, for each of them. In a loop:

1. `start` in the streams of a virtual worker: what `iter(DataLoader)` draws there; or `resume` from a position.
2. `fetch` for each micro-batch, in its streams: the batch is consumed, and the next index is taken, as `next()` does.
3. `again` for a later pass over the same micro-batches.
4. `end_loop`: used up, or left.

`position` says at any boundary where a virtual worker is. Here batches are made in this process, in the virtual worker's
own streams (`num_workers=0`); `shared.py` has them made ahead by data workers.
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
from gyrostat.data.dataset_replica import DatasetReplica, offers_state
from gyrostat.data.indices import Indices, OwnSampler, SamplerIndices
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.order import EpochOrder
from gyrostat.data.position import PairState, Position, SamplerState
from gyrostat.data.rng import Streams


class BatchSource(ABC):
    """What both kinds share: positions, samplers, the generator."""

    draws_here = True
    """Making a batch draws from the streams in force."""

    def __init__(self, loader: OrderedLoader, ranks: Sequence[int], streams: Streams) -> None:
        self.loader, self.ranks, self._streams = loader, ranks, streams
        self._order: EpochOrder | None = None
        self._accumulate = 1
        self._first = 0
        self._positions: dict[int, Position] = {}
        self._indices: dict[int, Indices] = {}
        self._own: dict[int, OwnSampler] = {}
        self.started = False
        self.samples = 0
        """How many were fetched in this step, all virtual workers here together."""

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
        """A loop over the steps of an epoch begins, or goes on at `first_batch`."""
        self._order, self._accumulate, self._first, self.started = order, accumulate, first_batch, False
        nothing_more = Position(consumed=first_batch)
        self._positions = {rank: positions.get(rank, nothing_more) for rank in self.ranks}
        if self.loader.has_sampler:
            for rank in self.ranks:
                if rank not in self._own:
                    self._own[rank] = OwnSampler(self.loader.sampler_of(rank), self.loader.generator)
                    sampler = self._positions[rank].sampler
                    self._own[rank].hold(None if sampler is None else sampler.held)
                self._own[rank].begin(epoch)

    @property
    def resumes(self) -> bool:
        """The loop goes on where another worker, or an earlier run, left it: nothing is drawn at its start."""
        return self._first > 0

    def start(self, rank: int) -> None:
        """What `iter(DataLoader)` does on this rank; its streams are in force."""
        position = self._positions[rank]
        with self._generator(rank):
            self._indices[rank] = self._make_indices(rank)
            if position.base_seed is None:
                self._indices[rank].iterate()
                self._set(rank, base_seed=_draw_base_seed(self.loader.generator))
                if self.loader.num_workers > 0:
                    self._indices[rank].iterate()
            else:  # persistent data workers are seeded once
                self._indices[rank].iterate()
        self._set(rank, consumed=0, turn=0)
        self._started(rank)

    def resume(self, rank: int) -> None:
        """Go on from this rank's position. Whatever its sampler draws now, it has drawn before."""
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
        self._own[rank].hold(state.held)
        if generator is not None and state.generator is not None:
            generator.set_state(state.generator)
        indices = self._indices[rank] = self._make_indices(rank)
        indices.iterate()
        if not self._persists_from_before(rank):
            _draw_base_seed(generator)
            if self.loader.num_workers > 0:
                indices.iterate()
        asked = []
        for _ in range(state.asked):
            try:
                asked.append(indices.take())
            except StopIteration:
                continue
        self._streams.exchange(now)
        if generator is not None and untouched is not None:
            generator.set_state(untouched)
        # One that draws at every index drew between batches, from streams that had gone on: its answers were kept.
        self._resumed(rank, asked[position.consumed :] if state.ahead is None else list(state.ahead))

    @abstractmethod
    def begin_step(self) -> None:
        """A step is about to run: the micro-batches of the one before will not be wanted again."""

    @abstractmethod
    def available(self, rank: int, count: int) -> int:
        """How many of the next `count` micro-batches there are; the rank's streams are in force."""

    @abstractmethod
    def fetch(self, rank: int, number: int) -> Any:
        """The next micro-batch of this rank, number `number` of its step; its streams are in force."""

    @abstractmethod
    def again(self, rank: int, number: int) -> Any:
        """Once more, for a later pass."""

    @abstractmethod
    def end_loop(self) -> None: ...

    def exhaust(self, rank: int) -> None:
        """What asking for one batch too many does, as a `for` loop over a DataLoader does at its end."""

    # When virtual workers move to another worker.

    looks_ahead = False
    """Batches are made ahead: it takes a while until those of a virtual worker that comes here are."""

    def leave_at(self, rank: int, batch: int) -> Position | None:
        """This virtual worker will be elsewhere from micro-batch `batch` on. Its position there, if that is known already."""
        return None

    def expect(self, rank: int, position: Position) -> None:
        """This virtual worker will be here from that position on."""

    def call_off(self) -> None:
        """Nobody leaves, and nobody comes."""

    def rehost(self, ranks: Sequence[int], positions: Mapping[int, Position]) -> bool:
        """From now on other virtual workers live here; what is under way for those that stay goes on.

        False if that cannot be: then this feed is of no use any more.
        """
        return False

    def position(self, rank: int) -> Position:
        """Where this rank is, as far as micro-batches have been consumed."""
        position = self._positions[rank]
        if self.started and rank in self._indices and (state := self._indices[rank].state()) is not None:
            position = replace(position, sampler=state)
        return position

    def warm_up(self) -> None:
        """Do now what takes time when the first batch is wanted."""

    def close(self) -> None:
        """Nothing is wanted any more."""

    # For both kinds.

    def _started(self, rank: int) -> None:
        """The iteration of this rank has begun."""

    @abstractmethod
    def _resumed(self, rank: int, ahead: list[Any]) -> None:
        """The iteration of this rank goes on; its sampler had been asked for `ahead` already."""

    def _persists_from_before(self, rank: int) -> bool:
        """The iteration that is to go on was begun by data workers that had been seeded before it."""
        return False

    def _set(self, rank: int, **changes: Any) -> None:
        self._positions[rank] = replace(self._positions[rank], **changes)

    def _make_indices(self, rank: int) -> Indices:
        if not self.loader.has_sampler:
            return self.loader.indices(
                self._order, rank, self._positions[rank].consumed if self.resumes else 0
            )
        return SamplerIndices(self._own[rank], self.loader.batched, self._streams, self.loader.generator)

    def _take(self, rank: int) -> Any:
        """The next index; StopIteration if there is none."""
        if self.loader.has_sampler:
            with self._generator(rank):
                return self._indices[rank].take()
        return self._indices[rank].take()

    @contextmanager
    def _generator(self, rank: int) -> Iterator[None]:
        """Every virtual worker has a state of its own in the one generator that the script gave."""
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
            self._set(rank, generator=generator.get_state())
            generator.set_state(before)

    def _after_loop(self, rank: int) -> Position:
        """What is left of a position when the loop is over."""
        sampler = SamplerState(held=self._own[rank].held) if self.loader.has_sampler else None
        return Position(generator=self._positions[rank].generator, sampler=sampler)


class DirectBatchSource(BatchSource):
    """Batches made in this process when they are wanted."""

    def __init__(self, loader: OrderedLoader, ranks: Sequence[int], streams: Streams) -> None:
        super().__init__(loader, ranks, streams)
        self._fetchers: dict[int, Any] = {}
        self._twins: dict[int, DatasetReplica] = {}
        self._peeked: dict[int, Any] = {}
        self._asked: dict[tuple[int, int], Any] = {}
        self._kept: dict[tuple[int, int], Any] = {}
        self._recipe = loader.recipe(ranks)
        self._counted = 0

    def _started(self, rank: int) -> None:
        if self.loader.iterable:
            self._fetchers[rank] = self._fetcher(*self._twins[rank].parts)
        elif rank not in self._fetchers:
            self._fetchers[rank] = self._fetcher(self._recipe.dataset(rank), self._recipe.collate_fn)

    def _fetcher(self, dataset: Any, collate_fn: Any) -> Any:
        def collate(samples: Any) -> Any:
            self._counted = len(samples) if self._recipe.auto_collation else 1
            return collate_fn(samples)

        return self._recipe.fetcher(dataset, collate)

    def _resumed(self, rank: int, ahead: list[Any]) -> None:
        position = self._positions[rank]
        if not self.loader.iterable:
            self._started(rank)
            return
        state = position.pairs[0]
        replica = self._replica(rank)
        if offers_state(replica.parts[0]):
            replica.hold(state.held)
            now = self._streams.save()
            self._started(rank)
        else:
            # It cannot say where it is: run it from its beginning, and leave out what was made already.
            assert state.origin is not None
            now = self._streams.exchange(state.origin[0])
            replica.hold(state.origin[1])
            self._started(rank)
            for _ in range(position.consumed):
                self._fetchers[rank].fetch(self._recipe.every)
        self._streams.exchange(now)

    def start(self, rank: int) -> None:
        if self.loader.iterable:
            held, began = self._replica(rank).held(), self._streams.save()
            self._set(rank, pairs={0: PairState(rng=began, origin=(began, held))})
        super().start(rank)
        self._set(rank, base_seed=None)  # nobody is seeded with it

    def _replica(self, rank: int) -> DatasetReplica:
        """A rank's own dataset, over all its iterations."""
        if rank not in self._twins:
            self._twins[rank] = DatasetReplica(self._recipe.dataset(rank), self._recipe.collate_fn)
            if 0 in (pairs := self._positions[rank].pairs):
                self._twins[rank].hold(pairs[0].held)
        else:
            self._twins[rank].follow()
        return self._twins[rank]

    def position(self, rank: int) -> Position:
        position = super().position(rank)
        if self.started and self.loader.iterable and offers_state(self._twins[rank].parts[0]):
            pair = replace(position.pairs[0], held=self._twins[rank].held())
            position = replace(position, pairs={0: pair})
        return position

    def begin_step(self) -> None:
        self._asked.clear()
        self._kept.clear()
        self.samples = 0

    def available(self, rank: int, count: int) -> int:
        try:
            index = self._take(rank)
            self._peeked[rank] = self._make(rank, index) if self.loader.iterable else index
        except StopIteration:
            return 0
        return 1

    def fetch(self, rank: int, number: int) -> Any:
        if self.loader.iterable:
            batch, self._counted = self._peeked.pop(rank)
            self._kept[rank, number] = batch
        else:
            index = self._peeked.pop(rank) if rank in self._peeked else self._next(rank)
            self._asked[rank, number] = index
            batch = self._fetchers[rank].fetch(index)
        self.samples += self._counted
        self._set(rank, consumed=self._positions[rank].consumed + 1)
        return self._pinned(batch)

    def again(self, rank: int, number: int) -> Any:
        if self.loader.iterable:
            return self._pinned(self._kept[rank, number])
        return self._pinned(self._fetchers[rank].fetch(self._asked[rank, number]))

    def _make(self, rank: int, index: Any) -> tuple[Any, int]:
        return self._fetchers[rank].fetch(index), self._counted

    def _next(self, rank: int) -> Any:
        try:
            return self._take(rank)
        except StopIteration:
            raise ran_out(rank, self._positions[rank].consumed) from None

    def _pinned(self, batch: Any) -> Any:
        return torch_internals.pinned(batch) if self.loader.pins else batch

    def exhaust(self, rank: int) -> None:
        if self.loader.has_sampler:
            with suppress(StopIteration):
                self._take(rank)

    def end_loop(self) -> None:
        self.begin_step()
        self._peeked.clear()
        if self.started:
            self._positions = {rank: self._after_loop(rank) for rank in self.ranks}
            for rank in self._twins:
                nothing = self._streams.save()
                self._set(rank, pairs={0: PairState(rng=nothing, held=self._twins[rank].held())})
        self.started = False


def ran_out(rank: int, consumed: int) -> Misuse:
    return Misuse(
        f"the sampler of virtual worker {rank} gave {consumed} batches, and len() had promised more; let its __len__ say how "
        "many it gives, or leave it out"
    )


def _draw_base_seed(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
