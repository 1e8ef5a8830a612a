"""What a virtual worker that is relocated in the middle of a loop has missed, done to its context and its data.

Its context is as old as the backups: from the end of the last completed pass. Since then the other virtual workers may have
fetched a step's micro-batches, or ended loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gyrostat.core.errors import PeerLost
from gyrostat.data.batch_source import BatchSource
from gyrostat.data.position import Position
from gyrostat.data.rng import RngState
from gyrostat.data.shared_source import make_batch_source
from gyrostat.engine.training.backups import ContextBackups
from gyrostat.engine.training.context_switch import ContextSwitch
from gyrostat.engine.training.plan import DataLoop, StepPlan
from gyrostat.engine.training.positions import begin_source, positions_in, save_position


def end_source(source: BatchSource, used_up: bool, contexts: ContextSwitch) -> None:
    """The loop is over for the virtual workers of this source. Some may have been relocated by a death at a fence."""
    if used_up and source.loader.has_sampler and source.loader.num_workers == 0:
        for rank in source.ranks:
            if rank in contexts.contexts:
                contexts.in_streams_of(rank, source.exhaust)
    source.end_loop()


def replay_end(loop: DataLoop, used_up: bool, ranks: Sequence[int], contexts: ContextSwitch) -> None:
    """The contexts of these virtual workers are from the middle of `loop`: do to them what its end did to the others."""
    loader = loop.loader
    found = positions_in(contexts.contexts, loader, ranks)
    positions = {rank: position for rank, position in found.items() if position.consumed}
    if not positions:
        return
    if not loader.remembers_loops:
        for rank in positions:
            contexts.contexts[rank].data[loader.number] = Position()
        return
    source = make_batch_source(loader, sorted(positions), contexts.streams)
    consumed = min(position.consumed for position in positions.values())
    begin_source(source, replace(loop, first_batch=consumed), positions)
    for rank in source.ranks:
        source.resume(rank)
    source.started = True
    if loop.batches is None and used_up:
        for rank in source.ranks:
            contexts.in_streams_of(rank, lambda rank: source.available(rank, loop.accumulate))
    end_source(source, used_up, contexts)
    for rank in source.ranks:
        save_position(contexts.contexts[rank], rank, source)
    source.close()


def fetch_first_pass(
    source: BatchSource, plan: StepPlan, contexts: ContextSwitch, backups: ContextBackups
) -> dict[tuple[int, int], RngState]:
    """Fetch what the virtual workers of this source had fetched in the step's first pass, and discard it.

    Returns the streams under which that was done, by rank and micro-batch, where fetching draws from them.
    """
    under: dict[tuple[int, int], RngState] = {}
    for rank in source.ranks:
        recorded = backups.fetched(rank)
        if source.draws_here and len(recorded) < plan.micro_batches:
            raise PeerLost(
                "the random streams under which the dead worker fetched micro-batches in this step's first pass are not known"
            )
        for number in range(plan.micro_batches):
            if source.draws_here:
                under[rank, number] = contexts.contexts[rank].rng = recorded[number]
            contexts.in_streams_of(rank, partial(source.fetch, number=number))
    return under
