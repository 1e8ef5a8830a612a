"""Data positions in contexts: where each virtual worker stands in the loops over each loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gyrostat.data.batch_source import BatchSource
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.position import Position
from gyrostat.engine.training.context import Context
from gyrostat.engine.training.plan import DataLoop


def positions_in(
    contexts: Mapping[int, Context], loader: OrderedLoader, ranks: Iterable[int]
) -> dict[int, Position]:
    """The saved positions of these virtual workers. Loaders that share a generator share its state."""
    positions = {}
    for rank in ranks:
        data = contexts[rank].data
        if loader.number in data:
            positions[rank] = data[loader.number]
        if loader.generator is not None and loader.generator_owner in data:
            state = data[loader.generator_owner].generator
            positions[rank] = replace(positions.get(rank, Position()), generator=state)
    return positions


def save_position(context: Context, rank: int, source: BatchSource) -> None:
    """Save in its context where virtual worker `rank` stands."""
    loader = source.loader
    position = context.data[loader.number] = source.position(rank)
    if loader.generator is not None:
        owner = context.data.get(loader.generator_owner, Position())
        context.data[loader.generator_owner] = replace(owner, generator=position.generator)


def begin_source(source: BatchSource, loop: DataLoop, positions: Mapping[int, Position]) -> None:
    source.begin_loop(
        loop.order,
        epoch=loop.epoch,
        accumulate=loop.accumulate,
        first_batch=loop.first_batch,
        positions=positions,
    )
