"""The engine proper: N virtual workers take turns on this worker's one model.

1. Switch in the virtual worker's random streams and, if it has any of its own, buffers.
2. The script runs its micro-batches: forward, `step.backward`.
3. Its gradients go to the reductions, its streams back into its context.
4. After the last one, all workers exchange what they know, gradients are reduced module by module in track order, and
   virtual worker 0's buffers become the shared ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import nn

from gyrostat.core.job import Reduction as ReductionOrder
from gyrostat.core.placement import Placement
from gyrostat.core.progress import Progress
from gyrostat.data.feed import Feed
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.position import Position
from gyrostat.data.rng import RngState, seed_all
from gyrostat.data.shared import make_feed
from gyrostat.engine import statetree
from gyrostat.engine.buffers import ModuleBuffers, pack, unpack
from gyrostat.engine.context import Context
from gyrostat.engine.group import Group, Pending
from gyrostat.engine.paced import PacedDevice
from gyrostat.engine.reduce.base import Reduction
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.reduce.ddp import DdpOrder
from gyrostat.engine.reduce.gradients import ModuleGradients, Part
from gyrostat.engine.reduce.tree import TreeOrder
from gyrostat.engine.runner import DataLoop, MicroBatch, Runner, StepPlan

_LEAD = 2
"""Steps for which a change is known before it takes place, where data workers look ahead."""


@dataclass
class _Moves:
    """Which virtual workers will live here from the boundary of a step on."""

    hosted: Sequence[int]
    step: int
    told: set[int] = field(default_factory=set)
    """Of those that leave: whose positions are told."""


class VirtualRunner(Runner):
    """Runs the virtual workers of one worker in turn."""

    def __init__(
        self,
        *,
        placement: Placement,
        group: Group,
        seed: int,
        order: ReductionOrder = ReductionOrder.DDP,
        paced: PacedDevice | None = None,
    ) -> None:
        super().__init__(placement=placement, group=group, seed=seed)
        self.order, self._paced = order, paced
        self.contexts: dict[int, Context] = {}
        self.gradients: list[ModuleGradients] = []
        self.buffers: list[ModuleBuffers] = []
        self._shared_streams: RngState | None = None
        self._previous = -1
        self._buffers_under_way: Pending | None = None
        self._fetched_under: dict[tuple[int, int], RngState] = {}
        self._sizes: dict[tuple[int, int], int] = {}  # of micro-batches, for a paced device
        self._feeds: dict[int, Feed] = {}
        self._feed: Feed | None = None
        self._loop: DataLoop | None = None
        self._moves: _Moves | None = None
        self._warm: Feed | None = None
        self._prefilled: tuple[Feed, DataLoop] | None = None

    def add_module(self, name: str, module: nn.Module, options: DdpOptions) -> None:
        self._modules[name] = module
        if self._paced is not None:
            self._paced.stand_in_for(name, module)
        gradients = ModuleGradients(name, module, options, overlap=self.group.size > 1)
        if gradients.parameters:
            gradients.reduction = self._make_reduction(gradients)
            self.gradients.append(gradients)
        buffers = ModuleBuffers(
            name,
            module,
            trained=bool(gradients.parameters),
            broadcast=options.broadcast_buffers,
            group=self.group,
        )
        if buffers:
            self.buffers.append(buffers)

    @cached_property
    def reduced(self) -> frozenset[int]:
        return frozenset(id(parameter) for gradients in self.gradients for parameter in gradients.parameters)

    def _make_reduction(self, gradients: ModuleGradients) -> Reduction:
        if self.order is ReductionOrder.TREE:
            return TreeOrder(gradients.parameters, self.placement, self.group)
        return DdpOrder(gradients.parameters, gradients.options, self.placement, self.group)

    def start_streams(self) -> None:
        shared = self.streams.save()
        for rank in self.hosted:
            seed_all(self.seed + rank)
            self.contexts[rank] = Context(self.streams.save())
        self.streams.exchange(shared)

    def move(self, placement: Placement, group: Group, contexts: Sequence[Any], *, done: int = 0) -> None:
        """A new generation: other virtual workers, other peers; the bits go on as they were.

        `done`: steps of the loop over data that is running.
        """
        self.placement, self.group = placement, group
        self.hosted = placement.held_by(group.rank)
        stay = self.contexts
        self.contexts = {rank: stay.get(rank) or Context.from_tree(contexts[rank]) for rank in self.hosted}
        for gradients in self.gradients:
            before = gradients.reduction
            gradients.overlap(group.size > 1)
            gradients.reduction = self._make_reduction(gradients)
            gradients.reduction.load_state_dict(before.state_dict())
            gradients.reduction.inherit(before)
        for buffers in self.buffers:
            buffers.group = group
        self._moves = None
        self._move_data(done)
        if self._warm is not None:
            self._feeds[self._warm.loader.number], self._warm = self._warm, None

    def _move_data(self, done: int) -> None:
        """What data workers have made for virtual workers that stay is kept, in the loop that is running."""
        for feed in self._feeds.values():
            if feed is not self._feed:
                feed.close()
        self._feeds.clear()
        if self._loop is None or self._feed is None:
            return
        loop = replace(self._loop, first_batch=done * self._loop.accumulate)
        positions = self._positions(loop.loader)
        if positions.keys() == set(self.hosted) and self._feed.rehost(self.hosted, positions):
            self._feeds[loop.loader.number], self._loop = self._feed, loop
        else:
            self._feed.close()
            self.begin_loop(loop)

    @property
    def fence_lead(self) -> int:
        return _LEAD if self._feed is not None and self._feed.looks_ahead else 0

    def announce(self, placement: Placement, worker: int | None, step: int) -> None:
        """From the boundary of `step` on this will be worker `worker` of `placement`, or none."""
        hosted = () if worker is None else placement.held_by(worker)
        if self._moves is None or self._moves.hosted != hosted or self._moves.step != step:
            self._moves = _Moves(hosted, step)

    def call_off(self) -> None:
        """Nobody moves, as far as is known."""
        if self._moves is not None:
            self._moves = None
            if self._feed is not None:
                self._feed.call_off()

    def leaving(self, progress: Progress) -> bytes:
        moves = self._moves
        if moves is None or self._feed is None or self._loop is None:
            return b""
        batch = (progress.done + moves.step - progress.step) * self._loop.accumulate
        known = {}
        for rank in self.hosted:
            if rank not in moves.hosted and rank not in moves.told:
                position = self._feed.leave_at(rank, batch)
                if position is not None:
                    known[rank] = position.to_tree()
        moves.told.update(known)
        return statetree.encode(known) if known else b""

    def expect(self, positions: Mapping[int, Any]) -> None:
        """Virtual workers will stand there when they come; those that come here can be prepared for."""
        if self._moves is not None and self._feed is not None:
            for rank, tree in positions.items():
                if rank in self._moves.hosted:
                    self._feed.expect(rank, Position.from_tree(tree))

    def layouts(self) -> dict[str, Any]:
        """What decides the order of reductions, by module."""
        return {gradients.name: gradients.reduction.state_dict() for gradients in self.gradients}

    def loop_at(self, step: int, progress: Progress) -> DataLoop | None:
        """The loop that is running, as it will be at the boundary of `step`."""
        if self._loop is None:
            return None
        done = progress.done + step - progress.step
        return replace(self._loop, first_batch=done * self._loop.accumulate)

    def warm_up(self, loader: OrderedLoader, ranks: Sequence[int]) -> None:
        """A newcomer: start data workers for these virtual workers."""
        if self._warm is None:
            self._warm = make_feed(loader, ranks, self.streams)
            self._warm.warm_up()

    def prefill(self, loop: DataLoop, positions: Mapping[int, Position]) -> None:
        """A newcomer: let data workers make what its first steps will need."""
        ranks = sorted(positions)
        feed, self._warm = self._warm, None
        if feed is None or feed.loader is not loop.loader or list(feed.ranks) != ranks:
            feed = make_feed(loop.loader, ranks, self.streams)
        self._begin_feed(feed, loop, positions)
        for rank in feed.ranks:
            feed.resume(rank)
        feed.started = True
        feed.begin_step()
        self._prefilled = feed, loop

    def prepare_to_move(self, placement: Placement, group: Group, layouts: Mapping[str, Any]) -> None:
        """A newcomer: touch the memory that its first pass will need."""
        alone = self.placement, self.group
        self.placement, self.group = placement, group
        for gradients in self.gradients:
            gradients.reduction = self._make_reduction(gradients)
            gradients.reduction.load_state_dict(layouts[gradients.name])
            gradients.reduction.warm_up()
        self.placement, self.group = alone

    def begin_pass(self) -> None:
        self.adopt_changed_buffers()
        for buffers in self.buffers:
            buffers.begin_pass(several=len(self.hosted) > 1)
        for gradients in self.gradients:
            gradients.begin_pass()

    def adopt_changed_buffers(self) -> None:
        """What the script has set outside the inner loop, virtual workers that keep buffers of their own get, too."""
        for buffers in self.buffers:
            for number in buffers.changed():
                for rank in self.hosted:
                    own = self.contexts[rank].buffers.get(buffers.name)
                    if own is not None:
                        own[number] = buffers.current()[number].detach().clone()

    def enter(self, rank: int, weight: float | None) -> None:
        context = self.contexts[rank]
        outgoing = self.streams.exchange(context.rng)
        first = rank == self.hosted[0]
        if first:
            self._shared_streams = outgoing
        else:
            self.contexts[self._previous].rng = outgoing
        self._previous = rank
        for buffers in self.buffers:
            buffers.enter(rank, context.buffers.get(buffers.name), first=first)
        for gradients in self.gradients:
            gradients.begin_rank(rank, weight=weight, last_here=rank == self.hosted[-1])

    # Data.

    @property
    def feed(self) -> Feed:
        assert self._feed is not None
        return self._feed

    @property
    def samples(self) -> int:
        return self.feed.samples

    def begin_loop(self, loop: DataLoop) -> None:
        self._loop, loader = loop, loop.loader
        if self._take_prefilled(loop):
            return
        if loader.number not in self._feeds:
            self._feeds[loader.number] = make_feed(loader, self.hosted, self.streams)
        self._feed = self._feeds[loader.number]
        self._begin_feed(self._feed, loop, self._positions(loader))

    def _begin_feed(self, feed: Feed, loop: DataLoop, positions: Mapping[int, Position]) -> None:
        feed.begin_loop(
            loop.order,
            epoch=loop.epoch,
            accumulate=loop.accumulate,
            first_batch=loop.first_batch,
            positions=positions,
        )

    def _take_prefilled(self, loop: DataLoop) -> bool:
        """What was made before this worker joined, if it is what it needs now."""
        if self._prefilled is None:
            return False
        (feed, made_for), self._prefilled = self._prefilled, None
        if made_for.is_same_as(loop) and list(feed.ranks) == list(self.hosted):
            self._feed = self._feeds[loop.loader.number] = feed
            return True
        feed.close()
        return False

    def _positions(self, loader: OrderedLoader) -> dict[int, Position]:
        positions = {}
        for rank in self.hosted:
            data = self.contexts[rank].data
            if loader.number in data:
                positions[rank] = data[loader.number]
            if loader.generator is not None and loader.generator_owner in data:
                state = data[loader.generator_owner].generator
                positions[rank] = replace(positions.get(rank, Position()), generator=state)
        return positions

    def _start_feed(self) -> None:
        """What `iter(DataLoader)` draws belongs to a virtual worker's first micro-batch, but is drawn for all at once."""
        if not self.feed.started:
            for rank in self.hosted:
                if self.feed.resumes:
                    self.feed.resume(rank)
                else:
                    self._in_streams_of(rank, self.feed.start)
            self.feed.started = True

    def _in_streams_of(self, rank: int, do: Callable[[int], Any]) -> Any:
        outside = self.streams.exchange(self.contexts[rank].rng)
        try:
            return do(rank)
        finally:
            self.contexts[rank].rng = self.streams.exchange(outside)

    def available(self, count: int, progress: Progress) -> int:
        self._start_feed()
        fewest = min(
            self._in_streams_of(rank, lambda rank: self.feed.available(rank, count)) for rank in self.hosted
        )
        return self._fewest("data", fewest, progress)

    def end_loop(self, *, used_up: bool) -> None:
        if used_up and self.feed.loader.has_sampler and self.feed.loader.num_workers == 0:
            for rank in self.hosted:
                self._in_streams_of(rank, self.feed.exhaust)
        self.feed.end_loop()
        self.save_positions()
        self._feed = self._loop = None

    def save_positions(self) -> None:
        """Note in the contexts where virtual workers stand in the loop that is running."""
        if self._feed is not None and self._feed.loader.leaves_traces:
            loader = self._feed.loader
            for rank in self.hosted:
                data = self.contexts[rank].data
                position = data[loader.number] = self._feed.position(rank)
                if loader.generator is not None:
                    owner = data.get(loader.generator_owner, Position())
                    data[loader.generator_owner] = replace(owner, generator=position.generator)

    def begin_data(self, pass_: int) -> None:
        self._start_feed()
        if pass_ == 0:
            self.feed.begin_step()
            self._fetched_under.clear()

    def fetch(self, plan: StepPlan, rank: int, number: int, pass_: int) -> Any:
        if self._paced is None:
            return self._fetch(rank, number, pass_)
        before = self.feed.samples
        batch = self._fetch(rank, number, pass_)
        # A later pass fetches the same ones again, uncounted.
        samples = self._sizes[rank, number] = self.feed.samples - before or self._sizes[rank, number]
        self._paced.load(plan.content(rank, number), samples)
        return batch

    def _fetch(self, rank: int, number: int, pass_: int) -> Any:
        feed = self.feed
        if not feed.draws_here:
            return feed.again(rank, number) if pass_ > 0 else feed.fetch(rank, number)
        if pass_ > 0:
            # The same micro-batch again: fetched under the streams of the first time, which then go on where they are.
            now = self.streams.exchange(self._fetched_under[rank, number])
            batch = feed.again(rank, number)
            self.streams.exchange(now)
            return batch
        # At the virtual worker's first micro-batch, what is in force is what was just switched in: nothing to save.
        self._fetched_under[rank, number] = self.contexts[rank].rng if number == 0 else self.streams.save()
        return feed.fetch(rank, number)

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        for buffers in self.buffers:
            buffers.micro_batch(last=micro_batch.last)
        if micro_batch.last:
            for gradients in self.gradients:
                gradients.begin_last_micro_batch()
        if self._paced is not None:
            self._paced.begin()

    def before_backward(self, micro_batch: MicroBatch) -> None:
        for gradients in self.gradients:
            gradients.before_backward(first=micro_batch.number == 0)

    def after_backward(self, micro_batch: MicroBatch) -> None:
        if self._paced is not None:
            self._paced.wait()  # a loss through none of the tracked modules has not waited
        if micro_batch.last:
            for gradients in self.gradients:
                gradients.end_rank()

    def leave(self, rank: int) -> None:
        context = self.contexts[rank]
        for buffers in self.buffers:
            own = buffers.leave(rank, alone=len(self.hosted) == 1)
            if own is None:
                context.buffers.pop(buffers.name, None)
            else:
                context.buffers[buffers.name] = own

    def end_pass(self) -> bytes:
        assert self._shared_streams is not None
        self.contexts[self._previous].rng = self.streams.exchange(self._shared_streams)
        for buffers in self.buffers:
            buffers.end_pass()
        return msgspec.msgpack.encode([gradients.part() for gradients in self.gradients])

    def send_off(self) -> None:
        for gradients in self.gradients:
            gradients.send_off(hosted=len(self.hosted))
        if self.buffers:
            self._buffers_under_way = self.group.broadcast(pack(self._current_buffers()))

    def settle(self, extras: Sequence[bytes]) -> None:
        parts = [msgspec.msgpack.decode(extra, type=list[Part]) for extra in extras]
        for number, gradients in enumerate(self.gradients):
            gradients.settle([worker[number] for worker in parts], self.placement.virtual_workers)
        self._share_buffers()

    def local(self, rank: int) -> dict[str, Any]:
        return self.contexts[rank].local

    def _current_buffers(self) -> list[torch.Tensor]:
        return [tensor for buffers in self.buffers for tensor in buffers.current()]

    def _share_buffers(self) -> None:
        """Virtual worker 0's buffers, wherever it runs, become everybody's."""
        if self._buffers_under_way is not None:
            packed, self._buffers_under_way = self._buffers_under_way.wait(), None
            if self.group.rank != 0:
                self._receive_buffers(packed)
        for buffers in self.buffers:
            buffers.mark()

    def _receive_buffers(self, packed: torch.Tensor) -> None:
        received = unpack(packed, self._current_buffers())
        for buffers in self.buffers:
            count = len(buffers.current())
            buffers.restore(received[:count])
            received = received[count:]
