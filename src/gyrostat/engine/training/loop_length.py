"""How many micro-batches every virtual worker has in a loop over data. All workers agree on it before the loop begins."""

from __future__ import annotations

from typing import Any

from gyrostat.core.progress import Progress
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.order import EpochOrder
from gyrostat.engine.training.collectives import Collectives
from gyrostat.engine.training.generation import CurrentGeneration

_UNKNOWN = -1


class LoopLength:
    """Counts the micro-batches of loops."""

    def __init__(self, generation: CurrentGeneration, collectives: Collectives) -> None:
        self._generation, self._collectives = generation, collectives
        self._received: tuple[int | None] | None = None

    def receive(self, batches: int | None) -> None:
        """A newcomer that joins in the middle of a loop: the others have counted."""
        self._received = (batches,)

    def of(self, loader: OrderedLoader, order: EpochOrder | None, progress: Progress) -> int | None:
        """Micro-batches of every virtual worker in an epoch; None if that is not known beforehand."""
        if self._received is not None:
            (batches,), self._received = self._received, None
            return batches
        if order is not None:
            return order.batches
        if loader.iterable:
            return None

        def least_here() -> int:
            ranks = self._generation.local_ranks
            return min(_length(loader.batched(loader.sampler_of(rank))) for rank in ranks)

        least = self._collectives.minimum("length", progress, least_here)
        return None if least < 0 else least


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return _UNKNOWN
