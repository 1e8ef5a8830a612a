"""The micro-batches of the local virtual workers: one batch source per loader, and the loop over data that is running.

Virtual workers that are relocated here in the middle of the loop, after a death, get a source of their own until the loop ends
or the generation changes at a fence. Their contexts come from backups (`backups.py`); `loop_replay.py` does to them what the
loop has done to the others meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gyrostat.data.batch_source import BatchSource
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.position import Position
from gyrostat.data.rng import RngState
from gyrostat.data.shared_source import make_batch_source
from gyrostat.engine.training.backups import ContextBackups
from gyrostat.engine.training.context_switch import ContextSwitch
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.loop_replay import end_source, fetch_first_pass, replay_end
from gyrostat.engine.training.plan import DataLoop, StepPlan
from gyrostat.engine.training.positions import begin_source, positions_in, save_position
from gyrostat.engine.training.prefill import Prefill


class BatchSources:
    """Makes the micro-batches of the local virtual workers."""

    def __init__(
        self, generation: CurrentGeneration, contexts: ContextSwitch, backups: ContextBackups
    ) -> None:
        self._generation, self._contexts, self._backups = generation, contexts, backups
        self.prefill = Prefill(contexts.streams)
        self._by_loader: dict[int, BatchSource] = {}
        self._main: BatchSource | None = None  # of the loop that is running
        self._relocated: list[BatchSource] = []  # of virtual workers that arrived in the middle of the loop
        self.loop: DataLoop | None = None
        """The loop that is running."""
        self._fetched_under: dict[
            tuple[int, int], RngState
        ] = {}  # streams, by rank and micro-batch of the step
        self._available: dict[int, int] = {}  # micro-batches, by rank
        self._passes = 0  # of the last step
        self._several_passes: bool | None = None  # in some steps; None: not known yet
        self._since_pass: list[
            Callable[[Sequence[int]], None]
        ] = []  # since the backups were updated, to contexts
        self._before_step: list[Callable[[Sequence[int]], None]] = []  # the same, when the step began

    # The loop.

    def begin_loop(self, loop: DataLoop) -> None:
        """A loop over a loader begins, or resumes at `loop.first_batch`."""
        self.loop, loader = loop, loop.loader
        self._available.clear()
        filled = self.prefill.take(loop, self._generation.local_ranks)
        if filled is not None:
            self._main = self._by_loader[loader.number] = filled
            return
        if loader.number not in self._by_loader:
            self._by_loader[loader.number] = make_batch_source(
                loader, self._generation.local_ranks, self._contexts.streams
            )
        self._main = self._by_loader[loader.number]
        begin_source(self._main, loop, self._saved_positions(loader))

    def available(self, count: int, done: int) -> int:
        """How many of the next `count` micro-batches every local virtual worker has, after `done` steps of the loop."""
        assert self.loop is not None
        self.add_arrivals(done * self.loop.accumulate)
        self._start_sources()
        for rank in self._generation.local_ranks:
            if rank not in self._available:
                self._available[rank] = self._contexts.in_streams_of(
                    rank, lambda rank: self._source_of(rank).available(rank, count)
                )
        return min(self._available.values())

    def forget_available(self) -> None:
        """Another step: `available` asks every virtual worker again."""
        self._available.clear()

    def end_loop(self, *, used_up: bool) -> None:
        """`used_up`: all micro-batches were consumed; otherwise the script has left the loop."""
        assert self.loop is not None
        for source in self._running:
            end_source(source, used_up, self._contexts)
        self.save_positions()
        for source in self._relocated:
            source.close()
        if self._backups.enabled:
            served = self._served_ranks()
            replay = partial(replay_end, self.loop, used_up, contexts=self._contexts)
            replay([r for r in self._generation.local_ranks if r not in served])
            self._since_pass.append(replay)
        self._relocated = []
        self._main = self.loop = None

    # One step.

    def begin_pass(self, plan: StepPlan, pass_: int) -> None:
        """Micro-batches are about to be fetched."""
        if pass_ == 0:
            if self._passes == 1:
                self._several_passes = bool(self._several_passes)
            self._backups.begin_step()
            self._before_step = list(self._since_pass)
            self._fetched_under.clear()
            self._start_sources()
            for source in self._running:
                source.begin_step()
        else:
            self._several_passes = True
        self._passes = pass_ + 1
        self.add_arrivals(plan.first_batch, pass_, plan)

    def fetch(self, plan: StepPlan, rank: int, number: int, pass_: int) -> Any:
        """Micro-batch `number` of virtual worker `rank`, whose streams are in force."""
        source = self._source_of(rank)
        if not source.draws_here:
            return source.again(rank, number) if pass_ > 0 else source.fetch(rank, number)
        streams = self._contexts.streams
        if pass_ > 0:
            # The same micro-batch again: fetched under the streams of the first time; then those of now are put back.
            now = streams.exchange(self._fetched_under[rank, number])
            batch = source.again(rank, number)
            streams.exchange(now)
            return batch
        # At the virtual worker's first micro-batch, the streams in force were just switched in: nothing to save.
        self._fetched_under[rank, number] = (
            self._contexts.contexts[rank].rng if number == 0 else streams.save()
        )
        return source.fetch(rank, number)

    @property
    def samples(self) -> int:
        """Samples that the local virtual workers have fetched in this step."""
        return sum(source.samples for source in self._running)

    def first_pass_streams(self, pass_: int) -> dict[int, list[RngState]] | None:
        """The streams under which each rank's micro-batches were fetched, if a later pass of the step may need them."""
        assert self._main is not None
        if pass_ > 0 or self._several_passes is False or not self._main.draws_here:
            return None
        return {
            rank: [self._fetched_under[key] for key in sorted(self._fetched_under) if key[0] == rank]
            for rank in self._generation.local_ranks
        }

    def save_positions(self) -> None:
        """Save in the contexts where the virtual workers stand in the loop that is running."""
        if self._main is not None and self._main.loader.leaves_traces:
            for rank in self._served_ranks():
                save_position(self._contexts.contexts[rank], rank, self._source_of(rank))

    def in_every_stream(self, do: Callable[[], Any]) -> None:
        """`do()`, outside a pass, with the streams of each local virtual worker in force."""

        def in_streams_of(ranks: Sequence[int]) -> None:
            for rank in ranks:
                self._contexts.in_streams_of(rank, lambda rank: do())

        in_streams_of(self._generation.local_ranks)
        if self._backups.enabled:
            self._since_pass.append(in_streams_of)

    # Relocation at a fence.

    @property
    def looks_ahead(self) -> bool:
        """Batches of a virtual worker that arrives here take a while to make."""
        return self._main is not None and self._main.looks_ahead

    def loop_at(self, steps: int) -> DataLoop | None:
        """The loop that is running, when `steps` of its steps will be done."""
        return None if self.loop is None else replace(self.loop, first_batch=steps * self.loop.accumulate)

    def leave_at(self, rank: int, steps: int) -> Position | None:
        """Virtual worker `rank` leaves when `steps` steps of the loop are done: its position then, if known already."""
        if self._main is None or self.loop is None or self._relocated:
            return None
        return self._main.leave_at(rank, steps * self.loop.accumulate)

    def expect(self, rank: int, position: Any) -> None:
        """Virtual worker `rank` will arrive here at that position, given as a tree."""
        if self._main is not None:
            self._main.expect(rank, Position.from_tree(position))

    def call_off(self) -> None:
        """No virtual worker leaves or arrives."""
        if self._main is not None:
            self._main.call_off()

    def switch(self, done: int) -> None:
        """Other virtual workers are local from now on. `done`: steps of the loop that is running.

        Batches that data workers have made for virtual workers that stay are kept.
        """
        for source in (*self._by_loader.values(), *self._relocated):
            if source is not self._main:
                source.close()
        self._by_loader.clear()
        self._since_pass = []
        together, self._relocated = not self._relocated, []
        if self.loop is not None and self._main is not None:
            self._switch_loop(
                self._main, replace(self.loop, first_batch=done * self.loop.accumulate), together
            )
        if (warm := self.prefill.take_warm()) is not None:
            self._by_loader[warm.loader.number] = warm

    def _switch_loop(self, source: BatchSource, loop: DataLoop, together: bool) -> None:
        positions, ranks = self._saved_positions(loop.loader), self._generation.local_ranks
        if together and positions.keys() == set(ranks) and source.rehost(ranks, positions):
            self._by_loader[loop.loader.number], self.loop = source, loop
        else:
            source.close()
            self.begin_loop(loop)

    # Relocation in the middle of the loop.

    def add_arrivals(self, first_batch: int, pass_: int = 0, plan: StepPlan | None = None) -> None:
        """Give virtual workers that arrived in the middle of the loop a source of their own.

        `plan`: of the step whose pass `pass_` is running; its micro-batches before that pass are fetched.
        """
        if self._running[0].ranks == self._generation.local_ranks:
            return
        served = self._served_ranks()
        ranks = [rank for rank in self._generation.local_ranks if rank not in served]
        if not ranks:
            return
        assert self.loop is not None
        loop = replace(self.loop, first_batch=first_batch)
        source = make_batch_source(loop.loader, ranks, self._contexts.streams)
        present = self._contexts.contexts
        if pass_ > 0:  # its micro-batches were fetched when the step began
            self._contexts.replace({**present, **{rank: self._backups.at_step(rank) for rank in ranks}})
        try:
            for replay in self._before_step if pass_ > 0 else ():
                replay(ranks)
            begin_source(source, loop, positions_in(self._contexts.contexts, loop.loader, ranks))
            self._relocated.append(source)
            self._start_sources()
            source.begin_step()
            if plan is not None:
                self._catch_up_with_step(source, plan, pass_)
        finally:
            self._contexts.replace(present)

    def _catch_up_with_step(self, source: BatchSource, plan: StepPlan, pass_: int) -> None:
        assert self.loop is not None
        if self.loop.batches is None:
            for rank in source.ranks:
                self._contexts.in_streams_of(rank, lambda rank: source.available(rank, plan.micro_batches))
        if pass_ > 0:
            self._fetched_under |= fetch_first_pass(source, plan, self._contexts, self._backups)

    def fetch_and_drop(self, rank: int, plan: StepPlan) -> None:
        """Virtual worker `rank` is left out of this pass; its data goes on."""
        for number in range(plan.micro_batches):
            self._contexts.in_streams_of(rank, partial(self._source_of(rank).fetch, number=number))

    def catch_up(self, arrivals: Sequence[int]) -> None:
        """Virtual workers have arrived with contexts as old as the last pass: do to them what was done to the others since."""
        for replay in self._since_pass:
            replay(arrivals)

    def backups_updated(self) -> None:
        """All backups are as new as the contexts."""
        self._since_pass = []

    # Inside.

    @property
    def _running(self) -> tuple[BatchSource, ...]:
        assert self._main is not None
        return (self._main, *self._relocated)

    def _source_of(self, rank: int) -> BatchSource:
        for source in self._relocated:
            if rank in source.ranks:
                return source
        assert self._main is not None
        return self._main

    def _served_ranks(self) -> list[int]:
        """The local virtual workers that have a source."""
        served = {rank for source in self._running for rank in source.ranks}
        return [rank for rank in self._generation.local_ranks if rank in served]

    def _saved_positions(self, loader: OrderedLoader) -> Mapping[int, Position]:
        return positions_in(self._contexts.contexts, loader, self._generation.local_ranks)

    def _start_sources(self) -> None:
        """What `iter(DataLoader)` draws belongs to a virtual worker's first micro-batch, but is drawn for all at once."""
        for source in self._running:
            if not source.started:
                for rank in source.ranks:
                    if (
                        rank not in self._contexts.contexts
                    ):  # relocated to another worker by a death at a fence
                        continue
                    if source.resumes:
                        source.resume(rank)
                    else:
                        self._contexts.in_streams_of(rank, source.start)
                source.started = True
