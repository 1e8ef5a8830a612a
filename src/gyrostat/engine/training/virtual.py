"""The engine proper: N virtual workers take turns on this worker's one model.

1. Switch in the virtual worker's random streams and, if it has any of its own, buffers.
2. The script runs its micro-batches: forward, `step.backward`.
3. Its gradients go to the reductions, its streams back into its context.
4. After the last one, all workers exchange what they know, gradients are reduced module by module in track order, and
   virtual worker 0's buffers become the shared ones.

When a worker is lost, its virtual workers come to the others, from backed-up contexts (`backups.py`), and with a feed of their
own until the loop over data ends or the next fence comes. `recovery.py` says who gets which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from gyrostat.core.errors import PeerLost
from gyrostat.core.job import ReductionOrder as ReductionOrder
from gyrostat.core.placement import Placement
from gyrostat.core.progress import Progress
from gyrostat.data.batch_source import BatchSource
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.position import Position
from gyrostat.data.rng import RngState, seed_all
from gyrostat.data.shared_source import make_batch_source
from gyrostat.engine.reduce.base import Reducer
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.reduce.ddp import DdpOrder
from gyrostat.engine.reduce.gradients import ModuleGradients, ModuleParticipation
from gyrostat.engine.reduce.tree import TreeOrder
from gyrostat.engine.state import statetree
from gyrostat.engine.training.backups import ContextBackups, ContextChange
from gyrostat.engine.training.buffers import ModuleBuffers, pack, unpack
from gyrostat.engine.training.context import Context
from gyrostat.engine.training.paced import PacedDevice
from gyrostat.engine.training.runner import DataLoop, MicroBatch, Runner, StepPlan
from gyrostat.engine.transport.group import Pending, WorkerGroup

_CHANGES = msgspec.msgpack.Decoder(list[ContextChange])
_PARTS = msgspec.msgpack.Decoder(list[ModuleParticipation])
_LEAD = 2
"""Steps for which a change is known before it takes place, where data workers look ahead."""


@dataclass
class _Moves:
    """Which virtual workers will live here from the boundary of a step on."""

    hosted: Sequence[int]
    step: int
    told: set[int] = field(default_factory=set)
    """Of those that leave: whose positions are told."""


@dataclass(frozen=True)
class RecoveryResult:
    """How those that are left go on."""

    placement: Placement
    group: WorkerGroup
    told: list[bytes] | None
    """What all said in the unit that was interrupted, if it was completed somewhere; of a pass, the sums are in place, too."""


class RecoverFromLoss(Protocol):
    """Blocks until those that are left have found one another."""

    def __call__(self, lost: PeerLost, *, in_pass: bool) -> RecoveryResult: ...


class VirtualRunner(Runner):
    """Runs the virtual workers of one worker in turn."""

    def __init__(
        self,
        *,
        placement: Placement,
        group: WorkerGroup,
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
        self._sources: dict[int, BatchSource] = {}
        self._source: BatchSource | None = None
        self._extra: list[BatchSource] = []  # of virtual workers that came in the middle of the loop
        self._loop: DataLoop | None = None
        self._moves: _Moves | None = None
        self._warm: BatchSource | None = None
        self._prefilled: tuple[BatchSource, DataLoop] | None = None
        self.backups: ContextBackups | None = None
        """None: nothing is kept for the case that a worker is lost."""
        self.rescue: RecoverFromLoss | None = None
        self.approximate = False
        """What a lost worker had computed in the pass that is running is left out, instead of run again."""
        self._dropped: list[int] = []
        self._inside = False  # a virtual worker's streams are in force
        self._entered = False  # somebody has been in, in this pass
        self._arrivals: tuple[int, ...] = ()  # came in the middle of the pass, and have not run
        self._next_placement: tuple[Placement, WorkerGroup] | None = None  # once the pass is settled
        self._several_passes: bool | None = None  # in some steps; None: not known yet
        self._passes = 0  # of the last step
        self._warm_reductions: dict[int, list[Reducer]] = {}  # by generation
        self._ended: list[
            tuple[DataLoop, bool]
        ] = []  # loops since backups were last brought up to date; used up?
        self.last_buffers: torch.Tensor | None = None
        self._available: dict[int, int] = {}

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

    def _make_reduction(
        self, gradients: ModuleGradients, placement: Placement | None = None, group: WorkerGroup | None = None
    ) -> Reducer:
        placement, group = placement or self.placement, group or self.group
        if self.order is ReductionOrder.TREE:
            return TreeOrder(gradients.parameters, placement, group)
        return DdpOrder(gradients.parameters, gradients.options, placement, group)

    def warm_reductions(self, placement: Placement, group: WorkerGroup) -> None:
        """A generation to come: touch the memory that it will need beyond what there is. Called by another thread."""
        made = []
        for gradients in self.gradients:
            reduction = self._make_reduction(gradients, placement, group)
            reduction.load_state_dict(gradients.reduction.state_dict())
            reduction.warm_up_beside(gradients.reduction)
            made.append(reduction)
        self._warm_reductions = {group.generation: made}

    def start_streams(self) -> None:
        shared = self.streams.save()
        all_ranks = range(self.placement.virtual_workers)
        fresh = {}
        for rank in self.hosted if self.backups is None else all_ranks:
            seed_all(self.seed + rank)
            fresh[rank] = Context(self.streams.save())
        self.streams.exchange(shared)
        self.contexts = {rank: fresh[rank] for rank in self.hosted}
        if self.backups is not None:
            self.backups.hold([fresh[rank].to_tree() for rank in all_ranks])

    def move(
        self, placement: Placement, group: WorkerGroup, contexts: Sequence[Any], *, done: int = 0
    ) -> None:
        """A new generation: other virtual workers, other peers; the bits go on as they were.

        `done`: steps of the loop over data that is running.
        """
        self.placement, self.group = placement, group
        self.hosted = placement.held_by(group.rank)
        stay = self.contexts
        self.contexts = {rank: stay.get(rank) or Context.from_tree(contexts[rank]) for rank in self.hosted}
        if self.backups is not None:
            self.backups.hold(contexts)
            self._ended = []
        warm = self._warm_reductions.get(group.generation) or map(self._make_reduction, self.gradients)
        self._warm_reductions = {}
        for gradients, reduction in zip(self.gradients, warm, strict=True):
            before = gradients.reduction
            gradients.overlap(group.size > 1)
            if reduction is not before:  # a newcomer has had it since it prepared
                gradients.reduction = reduction
                gradients.reduction.load_state_dict(before.state_dict())
                gradients.reduction.inherit(before)
        for buffers in self.buffers:
            buffers.group, buffers.main = group, placement.owner(0)
        self._moves = None
        self._move_data(done)
        if self._warm is not None:
            self._sources[self._warm.loader.number], self._warm = self._warm, None

    def _move_data(self, done: int) -> None:
        """What data workers have made for virtual workers that stay is kept, in the loop that is running."""
        for source in (*self._sources.values(), *self._extra):
            if source is not self._source:
                source.close()
        self._sources.clear()
        together, self._extra = not self._extra, []
        if self._loop is None or self._source is None:
            return
        loop = replace(self._loop, first_batch=done * self._loop.accumulate)
        positions = self._positions(loop.loader)
        if together and positions.keys() == set(self.hosted) and self._source.rehost(self.hosted, positions):
            self._sources[loop.loader.number], self._loop = self._source, loop
        else:
            self._source.close()
            self.begin_loop(loop)

    @property
    def fence_lead(self) -> int:
        return _LEAD if self._source is not None and self._source.looks_ahead else 0

    def announce(self, placement: Placement, worker: int | None, step: int) -> None:
        """From the boundary of `step` on this will be worker `worker` of `placement`, or none."""
        hosted = () if worker is None else placement.held_by(worker)
        if self._moves is None or self._moves.hosted != hosted or self._moves.step != step:
            self._moves = _Moves(hosted, step)

    def call_off(self) -> None:
        """Nobody moves, as far as is known."""
        self._warm_reductions = {}
        if self._moves is not None:
            self._moves = None
            if self._source is not None:
                self._source.call_off()

    def leaving(self, progress: Progress) -> bytes:
        moves = self._moves
        if moves is None or self._source is None or self._loop is None or self._extra:
            return b""
        batch = (progress.done + moves.step - progress.step) * self._loop.accumulate
        known = {}
        for rank in self.hosted:
            if rank not in moves.hosted and rank not in moves.told:
                position = self._source.leave_at(rank, batch)
                if position is not None:
                    known[rank] = position.to_tree()
        moves.told.update(known)
        return statetree.encode(known) if known else b""

    def expect(self, positions: Mapping[int, Any]) -> None:
        """Virtual workers will stand there when they come; those that come here can be prepared for."""
        if self._moves is not None and self._source is not None:
            for rank, tree in positions.items():
                if rank in self._moves.hosted:
                    self._source.expect(rank, Position.from_tree(tree))

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
            self._warm = make_batch_source(loader, ranks, self.streams)
            self._warm.warm_up()

    def prefill(self, loop: DataLoop, positions: Mapping[int, Position]) -> None:
        """A newcomer: let data workers make what its first steps will need."""
        ranks = sorted(positions)
        source, self._warm = self._warm, None
        if source is None or source.loader is not loop.loader or list(source.ranks) != ranks:
            source = make_batch_source(loop.loader, ranks, self.streams)
        self._begin_source(source, loop, positions)
        for rank in source.ranks:
            source.resume(rank)
        source.started = True
        source.begin_step()
        self._prefilled = source, loop

    def prepare_to_move(self, placement: Placement, group: WorkerGroup, layouts: Mapping[str, Any]) -> None:
        """A newcomer: touch the memory that its first pass will need."""
        for gradients in self.gradients:
            gradients.reduction = self._make_reduction(gradients, placement, group)
            gradients.reduction.load_state_dict(layouts[gradients.name])
            gradients.reduction.warm_up()
        self._warm_reductions = {group.generation: [gradients.reduction for gradients in self.gradients]}

    def begin_pass(self) -> None:
        self.adopt_changed_buffers()
        self._entered = False
        self._dropped = []
        for buffers in self.buffers:
            buffers.begin_pass(several=self._may_be_several)
        for gradients in self.gradients:
            gradients.begin_pass()

    @property
    def _may_be_several(self) -> bool:
        """More than one virtual worker runs here in this pass, or will if a worker is lost."""
        return len(self.hosted) > 1 or (self.backups is not None and self.group.size > 1)

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
        if self._inside:
            self.contexts[self._previous].rng = outgoing
        else:
            self._shared_streams = outgoing
        first, self._inside, self._entered = not self._entered, True, True
        self._previous = rank
        for buffers in self.buffers:
            buffers.enter(rank, context.buffers.get(buffers.name), first=first)
        last_here = rank == self.hosted[-1] and rank not in self._arrivals
        for gradients in self.gradients:
            gradients.begin_rank(rank, weight=weight, last_here=last_here)

    # Data.

    @property
    def source(self) -> BatchSource:
        assert self._source is not None
        return self._source

    def _source_of(self, rank: int) -> BatchSource:
        return next((source for source in self._extra if rank in source.ranks), self.source)

    @property
    def samples(self) -> int:
        return sum(source.samples for source in (self.source, *self._extra))

    def begin_loop(self, loop: DataLoop) -> None:
        self._loop, loader = loop, loop.loader
        self._available.clear()
        if self._take_prefilled(loop):
            return
        if loader.number not in self._sources:
            self._sources[loader.number] = make_batch_source(loader, self.hosted, self.streams)
        self._source = self._sources[loader.number]
        self._begin_source(self._source, loop, self._positions(loader))

    def _begin_source(self, source: BatchSource, loop: DataLoop, positions: Mapping[int, Position]) -> None:
        source.begin_loop(
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
        (source, made_for), self._prefilled = self._prefilled, None
        if made_for.is_same_as(loop) and list(source.ranks) == list(self.hosted):
            self._source = self._sources[loop.loader.number] = source
            return True
        source.close()
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

    def _start_source(self) -> None:
        """What `iter(DataLoader)` draws belongs to a virtual worker's first micro-batch, but is drawn for all at once."""
        for source in (self.source, *self._extra):
            if not source.started:
                for rank in self._of_here(source):
                    if source.resumes:
                        source.resume(rank)
                    else:
                        self._in_streams_of(rank, source.start)
                source.started = True

    def _in_streams_of(self, rank: int, do: Callable[[int], Any]) -> Any:
        outside = self.streams.exchange(self.contexts[rank].rng)
        try:
            return do(rank)
        finally:
            self.contexts[rank].rng = self.streams.exchange(outside)

    def available(self, count: int, progress: Progress) -> int:
        self._available.clear()

        def fewest_here() -> int:
            assert self._loop is not None
            self._house_arrivals(progress.done * self._loop.accumulate)
            self._start_source()
            for rank in self.hosted:
                if rank not in self._available:
                    self._available[rank] = self._in_streams_of(
                        rank, lambda rank: self._source_of(rank).available(rank, count)
                    )
            return min(self._available.values())

        return self._fewest("data", fewest_here, progress)

    def end_loop(self, *, used_up: bool) -> None:
        for source in (self.source, *self._extra):
            self._end_source(source, used_up)
        self.save_positions()
        for source in self._extra:
            source.close()
        assert self._loop is not None
        if self.backups is not None:
            self._replay_end(self._loop, used_up, [r for r in self.hosted if r not in self._housed()])
            self._ended.append((self._loop, used_up))
        self._extra = []
        self._source = self._loop = None

    def _end_source(self, source: BatchSource, used_up: bool) -> None:
        if used_up and source.loader.has_sampler and source.loader.num_workers == 0:
            for rank in self._of_here(source):
                self._in_streams_of(rank, source.exhaust)
        source.end_loop()

    def _of_here(self, source: BatchSource) -> list[int]:
        """Without those that a death at a fence has given to another worker."""
        return [rank for rank in source.ranks if rank in self.contexts]

    def save_positions(self) -> None:
        """Note in the contexts where virtual workers stand in the loop that is running."""
        if self._source is not None and self._source.loader.leaves_traces:
            for rank in self._housed():
                self._save_position(rank, self._source_of(rank))

    def _save_position(self, rank: int, source: BatchSource) -> None:
        loader, data = source.loader, self.contexts[rank].data
        position = data[loader.number] = source.position(rank)
        if loader.generator is not None:
            owner = data.get(loader.generator_owner, Position())
            data[loader.generator_owner] = replace(owner, generator=position.generator)

    def begin_data(self, plan: StepPlan, pass_: int) -> None:
        if pass_ == 0:
            if self._passes == 1:
                self._several_passes = bool(self._several_passes)
            if self.backups is not None:
                self.backups.begin_step()
            self._fetched_under.clear()
            self._start_source()
            for source in (self.source, *self._extra):
                source.begin_step()
        else:
            self._several_passes = True
        self._passes = pass_ + 1
        self._house_arrivals(plan.first_batch, pass_, plan)

    def fetch(self, plan: StepPlan, rank: int, number: int, pass_: int) -> Any:
        if self._paced is None:
            return self._fetch(rank, number, pass_)
        before = self.samples
        batch = self._fetch(rank, number, pass_)
        # A later pass fetches the same ones again, uncounted.
        samples = self._sizes[rank, number] = self.samples - before or self._sizes[rank, number]
        self._paced.load(plan.content(rank, number), samples)
        return batch

    def _fetch(self, rank: int, number: int, pass_: int) -> Any:
        source = self._source_of(rank)
        if not source.draws_here:
            return source.again(rank, number) if pass_ > 0 else source.fetch(rank, number)
        if pass_ > 0:
            # The same micro-batch again: fetched under the streams of the first time, which then go on where they are.
            now = self.streams.exchange(self._fetched_under[rank, number])
            batch = source.again(rank, number)
            self.streams.exchange(now)
            return batch
        # At the virtual worker's first micro-batch, what is in force is what was just switched in: nothing to save.
        self._fetched_under[rank, number] = self.contexts[rank].rng if number == 0 else self.streams.save()
        return source.fetch(rank, number)

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
            own = buffers.leave(rank, alone=not self._may_be_several)
            if own is None:
                context.buffers.pop(buffers.name, None)
            else:
                context.buffers[buffers.name] = own

    def end_pass(self) -> bytes:
        if self._inside:
            assert self._shared_streams is not None
            self.contexts[self._previous].rng = self.streams.exchange(self._shared_streams)
            self._inside = False
        self._arrivals = ()
        for buffers in self.buffers:
            buffers.end_pass()
        return msgspec.msgpack.encode([gradients.part() for gradients in self.gradients])

    def send_off(self) -> None:
        for gradients in self.gradients:
            gradients.send_off(hosted=len(self.hosted))
        if self.buffers:
            packed = pack(self._current_buffers())
            self._buffers_under_way = self.group.broadcast(packed, self.placement.owner(0))

    def complete(self, extras: Sequence[bytes]) -> None:
        parts = _parts(tuple(extras))
        for number, gradients in enumerate(self.gradients):
            gradients.complete([worker[number] for worker in parts], self.placement.virtual_workers)
        if self._buffers_under_way is not None:
            self._buffers_under_way.wait()

    def settle(self, extras: Sequence[bytes]) -> None:
        parts = _parts(tuple(extras))
        for number, gradients in enumerate(self.gradients):
            gradients.settle([worker[number] for worker in parts])
        self._share_buffers()

    def local(self, rank: int) -> dict[str, Any]:
        return self.contexts[rank].local

    def _current_buffers(self) -> list[torch.Tensor]:
        return [tensor for buffers in self.buffers for tensor in buffers.current()]

    def _share_buffers(self) -> None:
        """Virtual worker 0's buffers, wherever it runs, become everybody's."""
        if self._buffers_under_way is not None:
            packed, self._buffers_under_way = self._buffers_under_way.wait(), None
            self.last_buffers = packed
            if not self.leads:
                self._receive_buffers(packed)
        for buffers in self.buffers:
            buffers.mark()

    def _receive_buffers(self, packed: torch.Tensor) -> None:
        received = unpack(packed, self._current_buffers())
        for buffers in self.buffers:
            count = len(buffers.current())
            buffers.restore(received[:count])
            received = received[count:]

    # When a worker is lost.

    def changed_contexts(self, pass_: int) -> bytes:
        if self.backups is None or self.group.size == 1:
            return b""
        self.save_positions()
        fetched = None
        if pass_ == 0 and self._several_passes is not False and self.source.draws_here:
            fetched = {
                rank: [self._fetched_under[key] for key in sorted(self._fetched_under) if key[0] == rank]
                for rank in self.hosted
            }
        mine = {rank: self.contexts[rank] for rank in self.hosted}
        return msgspec.msgpack.encode(self.backups.changes(mine, fetched))

    def take_contexts(self, changes: Sequence[bytes]) -> None:
        if self.backups is not None:
            self._ended = []
            for payload in changes:
                if payload:
                    self.backups.take(_CHANGES.decode(payload))
        if self._next_placement is not None:  # what it had missed is made good: now it can follow the others
            (placement, group), self._next_placement = self._next_placement, None
            self._follow(placement, group, in_pass=False)

    @property
    def recovers(self) -> bool:
        return self.rescue is not None

    def recover(self, lost: PeerLost, plan: StepPlan | None) -> list[bytes] | None:
        if self.rescue is None or self.backups is None:
            raise lost
        self._buffers_under_way = None
        rescued = self.rescue(lost, in_pass=plan is not None)
        if rescued.told is not None and plan is not None:
            self._next_placement = rescued.placement, rescued.group
        else:
            self._arrivals = self._follow(rescued.placement, rescued.group, in_pass=plan is not None)
        return rescued.told

    def _follow(self, placement: Placement, group: WorkerGroup, *, in_pass: bool) -> tuple[int, ...]:
        """Those that are left go on together. Returns the virtual workers that come here, from backed-up contexts."""
        assert self.backups is not None
        before, self.hosted = self.hosted, placement.held_by(group.rank)
        self.placement, self.group = placement, group
        arrivals = tuple(rank for rank in self.hosted if rank not in before)
        self.contexts = {
            rank: self.backups.of(rank) if rank in arrivals else self.contexts[rank] for rank in self.hosted
        }
        for loop, used_up in self._ended:
            self._replay_end(loop, used_up, arrivals)
        self._moves = None
        for gradients in self.gradients:
            gradients.overlap(group.size > 1)
            if in_pass:
                gradients.retake(placement, group)
            else:
                gradients.reduction.retake(placement, group)
        for buffers in self.buffers:
            buffers.group, buffers.main = group, placement.owner(0)
        return arrivals

    def _replay_end(self, loop: DataLoop, used_up: bool, ranks: Sequence[int]) -> None:
        """They were in the middle of a loop when they were last heard of: do to their contexts what its end did to others'."""
        loader = loop.loader
        positions = {
            rank: at for rank, at in self._positions(loader).items() if rank in ranks and at.consumed
        }
        if not positions:
            return
        if not loader.remembers_loops:
            for rank in positions:
                self.contexts[rank].data[loader.number] = Position()
            return
        source = make_batch_source(loader, sorted(positions), self.streams)
        consumed = min(position.consumed for position in positions.values())
        self._begin_source(source, replace(loop, first_batch=consumed), positions)
        for rank in source.ranks:
            source.resume(rank)
        source.started = True
        if self.loop_batches is None and used_up:
            for rank in source.ranks:
                self._in_streams_of(rank, lambda rank: source.available(rank, loop.accumulate))
        self._end_source(source, used_up)
        for rank in source.ranks:
            self._save_position(rank, source)
        source.close()

    def room_for_buffers(self) -> torch.Tensor:
        """Where virtual worker 0's buffers go that this worker has missed."""
        return torch.empty_like(pack(self._current_buffers()))

    def missed_buffers(self, packed: torch.Tensor) -> None:
        self._buffers_under_way = Pending([], packed, lambda works: None)

    def to_run_again(self) -> Sequence[int]:
        return self._arrivals

    def prepare_again(self, plan: StepPlan, pass_: int) -> None:
        self._house_arrivals(plan.first_batch, pass_, plan)
        if not self.approximate:
            return
        for rank in self._arrivals:
            for number in range(plan.micro_batches if pass_ == 0 else 0):  # their data goes on nevertheless
                self._in_streams_of(rank, partial(self._source_of(rank).fetch, number=number))
            for gradients in self.gradients:
                gradients.leave_out(rank)
        self._dropped += self._arrivals
        self._arrivals = ()

    @property
    def dropped(self) -> Sequence[int]:
        return self._dropped

    def make_up_for(self, factor: float) -> None:
        for gradients in self.gradients:
            gradients.scale(factor)

    def _housed(self) -> list[int]:
        """The virtual workers here whose micro-batches a feed makes."""
        fed = {rank for source in (self.source, *self._extra) for rank in source.ranks}
        return [rank for rank in self.hosted if rank in fed]

    def _house_arrivals(self, first_batch: int, pass_: int = 0, plan: StepPlan | None = None) -> None:
        """Virtual workers that came in the middle of the loop get a feed of their own."""
        if self.source.ranks == self.hosted:
            return
        housed = self._housed()
        ranks = [rank for rank in self.hosted if rank not in housed]
        if not ranks:
            return
        assert self._loop is not None
        assert self.backups is not None
        loop = replace(self._loop, first_batch=first_batch)
        source = make_batch_source(loop.loader, ranks, self.streams)
        present = self.contexts
        if pass_ > 0:  # its micro-batches were fetched when the step began
            self.contexts = present | {rank: self.backups.at_step(rank) for rank in ranks}
        try:
            positions = self._positions(loop.loader)
            self._begin_source(source, loop, {rank: positions[rank] for rank in ranks if rank in positions})
            self._extra.append(source)
            self._start_source()
            source.begin_step()
            if plan is not None:
                self._catch_up_with_step(source, plan, pass_)
        finally:
            self.contexts = present

    def _catch_up_with_step(self, source: BatchSource, plan: StepPlan, pass_: int) -> None:
        """What the others have done in this step before they came to the pass that is running."""
        assert self.backups is not None
        if self.loop_batches is None:
            for rank in source.ranks:
                self._in_streams_of(rank, lambda rank: source.available(rank, plan.micro_batches))
        if pass_ == 0:
            return
        for rank in source.ranks:
            under = self.backups.fetched(rank)
            if source.draws_here and len(under) < plan.micro_batches:
                raise PeerLost(
                    "nobody knows how the lost micro-batches of this step's first pass were fetched"
                )
            for number in range(plan.micro_batches):
                if source.draws_here:
                    self._fetched_under[rank, number] = self.contexts[rank].rng = under[number]
                self._in_streams_of(rank, partial(source.fetch, number=number))


@lru_cache(maxsize=1)  # wanted twice in a pass, and mostly the same as in the pass before
def _parts(extras: tuple[bytes, ...]) -> list[list[ModuleParticipation]]:
    return [_PARTS.decode(extra) for extra in extras]
