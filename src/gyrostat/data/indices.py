"""What a virtual worker's loader asks its dataset for, one index after the other, and what that draws.

There are three sources: the job's own order (`order.py`), which draws nothing; a sampler or batch sampler of the user's,
which may draw from the rank's streams or from a generator; and for iterable datasets the same question for ever.

A user's sampler is an object of which every virtual worker gets a copy, as every rank has one, or a callable that makes
the sampler of a virtual rank. If it has `set_epoch`, that is called when an epoch begins. A sampler cannot say where it is,
so one that goes on elsewhere is iterated from where its iteration began, as often as it had been asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from gyrostat.data.dataset_replica import DatasetReplica, Held
from gyrostat.data.order import EpochOrder
from gyrostat.data.position import SamplerState
from gyrostat.data.rng import Streams


class Indices(Protocol):
    """The questions of one virtual worker in one iteration."""

    def iterate(self) -> None:
        """What `iter(sampler)` does."""

    def take(self) -> Any:
        """The next index. StopIteration if there is none."""

    def state(self) -> SamplerState | None: ...


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
    """An iterable dataset is asked for the next samples, until it has none."""

    def __init__(self, every: Any) -> None:
        self._every = every

    def iterate(self) -> None:
        pass

    def take(self) -> Any:
        return self._every

    def state(self) -> SamplerState | None:
        return None


class OwnSampler:
    """A user's sampler, as one virtual worker has it, over all its iterations."""

    def __init__(self, sampler: Any, generator: torch.Generator | None) -> None:
        # The loader's generator stays what it is in the copy: the sampler and the loader draw from one and the same.
        self._replica = DatasetReplica(sampler, keep=(generator,))
        self.sampler = self._replica.parts[0]

    def begin(self, epoch: int) -> None:
        """A loop begins: the copy follows what the script has changed in the sampler meanwhile, and hears of the epoch."""
        self._replica.follow()
        for thing in (self.sampler, getattr(self.sampler, "sampler", None)):
            if callable(set_epoch := getattr(thing, "set_epoch", None)):
                set_epoch(epoch)
                return

    @property
    def held(self) -> Held | None:
        return self._replica.held()

    def hold(self, held: Held | None) -> None:
        self._replica.hold(held)


class SamplerIndices:
    """What a user's sampler says."""

    def __init__(
        self,
        own: OwnSampler,
        batched: Callable[[Any], Any],
        streams: Streams,
        generator: torch.Generator | None,
    ) -> None:
        self._own, self._batched = own, batched
        self._iterator: Iterator[Any] = iter(())
        self._began = SamplerState(
            held=own.held,
            rng=streams.save(),
            generator=None if generator is None else generator.get_state(),
        )
        self._asked = 0

    def iterate(self) -> None:
        self._iterator = iter(self._batched(self._own.sampler))

    def take(self) -> Any:
        self._asked += 1
        return next(self._iterator)

    def state(self) -> SamplerState:
        began = self._began
        return SamplerState(held=began.held, rng=began.rng, generator=began.generator, asked=self._asked)
