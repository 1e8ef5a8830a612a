"""Batches of a newcomer, made by its data workers before it joins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gyrostat.data.batch_source import BatchSource
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.position import Position
from gyrostat.data.rng import Streams
from gyrostat.data.shared_source import make_batch_source
from gyrostat.engine.training.plan import DataLoop
from gyrostat.engine.training.positions import begin_source


class Prefill:
    """The batch source of the loop in which a newcomer will join."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._warm: BatchSource | None = None
        self._filled: tuple[BatchSource, DataLoop] | None = None

    def warm_up(self, loader: OrderedLoader, ranks: Sequence[int]) -> None:
        """Start data workers for these virtual workers."""
        if self._warm is None:
            self._warm = make_batch_source(loader, ranks, self._streams)
            self._warm.warm_up()

    def fill(self, loop: DataLoop, positions: Mapping[int, Position]) -> None:
        """Let data workers make the batches of the first steps."""
        ranks = sorted(positions)
        source, self._warm = self._warm, None
        if source is None or source.loader is not loop.loader or list(source.ranks) != ranks:
            source = make_batch_source(loop.loader, ranks, self._streams)
        begin_source(source, loop, positions)
        for rank in source.ranks:
            source.resume(rank)
        source.started = True
        source.begin_step()
        self._filled = source, loop

    def take_warm(self) -> BatchSource | None:
        """The source whose data workers run, if it has not been filled."""
        warm, self._warm = self._warm, None
        return warm

    def take(self, loop: DataLoop, ranks: Sequence[int]) -> BatchSource | None:
        """The filled source, if it is for this loop and these virtual workers."""
        if self._filled is None:
            return None
        (source, filled_for), self._filled = self._filled, None
        if filled_for.is_same_as(loop) and list(source.ranks) == list(ranks):
            return source
        source.close()
        return None
