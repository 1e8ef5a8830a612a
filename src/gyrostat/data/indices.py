"""The indices that a virtual worker's loader asks its dataset for, and the random numbers that choosing them draws.

There are three sources: the job's own order (`order.py`), which draws nothing; a sampler or batch sampler of the user, which
may draw from the rank's streams or from a generator; and for iterable datasets the same index every time.

A user's sampler is an object of which every virtual worker gets a copy, as every rank has one, or a callable that makes
the sampler of a virtual rank. If it has `set_epoch`, that is called when an epoch begins. A sampler cannot save its position,
so one that resumes elsewhere is iterated from the beginning of its iteration up to the index it had reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from gyrostat.data.dataset_replica import DatasetReplica, ReplicaState
from gyrostat.data.order import EpochOrder
from gyrostat.data.position import SamplerState
from gyrostat.data.rng import Streams


class Indices(Protocol):
    """The indices of one virtual worker in one iteration."""

    def iterate(self) -> None:
        """Begin, as `iter(sampler)` does."""

    def take(self) -> Any:
        """The next index. StopIteration if there is none."""

    def state(self) -> SamplerState | None:
        """The sampler's state; None if there is no sampler."""


class OrderIndices:
    """The job's own order."""

    def __init__(self, order: EpochOrder, rank: int, first: int, *, single: bool) -> None:
        self._order, self._rank, self._next, self._single = order, rank, first, single

    def iterate(self) -> None:
        pass

    def take(self) -> Any:
        if self._next == self._order.batches:
            raise StopIteration
        indices = self._order.indices(self._rank, self._next)
        self._next += 1
        return indices[0] if self._single else indices

    def state(self) -> SamplerState | None:
        return None


class EndlessIndices:
    """The same index every time, for an iterable dataset."""

    def __init__(self, every: Any) -> None:
        self._every = every

    def iterate(self) -> None:
        pass

    def take(self) -> Any:
        return self._every

    def state(self) -> SamplerState | None:
        return None


class RankSampler:
    """One virtual worker's copy of a user's sampler, over all its iterations."""

    def __init__(self, sampler: Any, generator: torch.Generator | None) -> None:
        # Not a copy of the loader's generator: sampler and loader draw from the same one.
        self._replica = DatasetReplica(sampler, keep=(generator,))
        self.sampler = self._replica.parts[0]

    def begin(self, epoch: int) -> None:
        """A loop begins: take over what the script has changed in the sampler, and set the epoch."""
        self._replica.follow_originals()
        for thing in (self.sampler, getattr(self.sampler, "sampler", None)):
            if callable(set_epoch := getattr(thing, "set_epoch", None)):
                set_epoch(epoch)
                return

    @property
    def state(self) -> ReplicaState | None:
        return self._replica.state()

    def load_state(self, state: ReplicaState | None) -> None:
        self._replica.load_state(state)


class SamplerIndices:
    """The indices of a user's sampler."""

    def __init__(
        self,
        sampler: RankSampler,
        batched: Callable[[Any], Any],
        streams: Streams,
        generator: torch.Generator | None,
    ) -> None:
        self._sampler, self._batched = sampler, batched
        self._iterator: Iterator[Any] = iter(())
        self._began = SamplerState(
            replica=sampler.state,
            rng=streams.save(),
            generator=None if generator is None else generator.get_state(),
        )
        self._taken = 0

    def iterate(self) -> None:
        self._iterator = iter(self._batched(self._sampler.sampler))

    def take(self) -> Any:
        self._taken += 1
        return next(self._iterator)

    def state(self) -> SamplerState:
        return replace(self._began, taken=self._taken)
