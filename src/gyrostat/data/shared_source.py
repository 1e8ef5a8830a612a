"""Micro-batches made ahead by data workers that all virtual workers here share.

Every virtual worker r has a queue of what its DataLoader would have asked its own data workers for: `prefetch_factor` times
`num_workers` indices, taken when torch would take them. What is at the head of these queues, in the order in which
training will consume it, is under way in the processes: `prefetch_factor` times `num_workers` batches in all, however many
virtual workers there are. Data worker j of virtual worker r is played by process (r + j) mod `num_workers`, so that each
process has one part in every virtual worker, and within a step all of them have something to do.

With every answer comes the state of (r, j) after it. It is committed to r's position when the batch is consumed; until
then it is what a process that has to be replaced goes on from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from gyrostat.data import torch_internals
from gyrostat.data.batch_source import BatchSource, DirectBatchSource, ran_out
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.object_copy import PLAIN
from gyrostat.data.position import PairState, Position
from gyrostat.data.rng import Streams
from gyrostat.data.virtual_data_worker import BatchReply, BatchRequest, StartDataWorker
from gyrostat.data.workers import DataWorkerPool, Task


@dataclass(eq=False)
class _Asked:
    """What a virtual worker's DataLoader would have asked one of its data workers for."""

    worker: int
    index: Any
    task: Task | None = None
    before: PairState | None = None
    after: PairState | None = None


@dataclass(eq=False)
class _Queue:
    """One virtual worker."""

    asked: deque[_Asked] = field(default_factory=deque)
    turn: int = 0
    """Which data worker is asked next."""
    latest: dict[int, PairState] = field(default_factory=dict)
    """By data worker: its state after the last answer."""
    under_way: int = 0
    """How many from the head of the queue have been given to a process."""
    until: int | None = None


class SharedBatchSource(BatchSource):
    """The virtual workers of this worker, and their common data workers."""

    draws_here = False

    def __init__(self, loader: OrderedLoader, ranks: Sequence[int], streams: Streams) -> None:
        super().__init__(loader, ranks, streams)
        self._count = loader.num_workers
        self._window = loader.prefetch_factor * loader.num_workers
        self._workers: DataWorkerPool | None = None
        self._queues: dict[int, _Queue] = {}
        self._later: set[int] = set()
        """Virtual workers whose data workers persist from an earlier iteration."""
        self._step: dict[tuple[int, int], _Asked] = {}
        self._kept: dict[tuple[int, int], Any] = {}
        self._repeated: dict[tuple[int, int], Task] = {}

    @property
    def workers(self) -> DataWorkerPool:
        if self._workers is None:
            self._workers = DataWorkerPool(
                self.loader.recipe(self.ranks), context=self.loader.context, timeout=self.loader.timeout
            )
        return self._workers

    # When virtual workers move to another worker.

    looks_ahead = True

    @property
    def _can_move(self) -> bool:
        """Whether positions can be known ahead, and taken up, while others are in the middle of the loop.

        Samplers draw at every batch from streams that are known when they have; datasets of ranks are in the processes.
        """
        loader = self.loader
        ordered = self._order is not None and not loader.has_sampler
        return self.started and ordered and not (loader.per_rank or loader.iterable)

    def leave_at(self, rank: int, batch: int) -> Position | None:
        if not self._can_move:
            return None
        self._queues[rank].until = batch
        self.workers.take_in()
        position = self.position(rank)
        ahead = batch - position.consumed
        asked = list(self._queues[rank].asked)[: max(ahead, 0)]
        if ahead < 0 or len(asked) < ahead or any(one.after is None for one in asked):
            return None
        pairs = dict(position.pairs) | {one.worker: one.after for one in asked if one.after is not None}
        turn = (asked[-1].worker + 1) % self._count if asked else position.turn
        return replace(position, consumed=batch, pairs=pairs, turn=turn)

    def expect(self, rank: int, position: Position) -> None:
        if self._can_move and rank not in self._queues:
            self._take_up(rank, position)
            self._pump()

    def call_off(self) -> None:
        if self._can_move:
            self._forget_ranks([rank for rank in self._queues if rank not in self.ranks])
            for queue in self._queues.values():
                queue.until = None
            self._pump()

    def rehost(self, ranks: Sequence[int], positions: Mapping[int, Position]) -> bool:
        if not self._can_move:
            return False
        self._forget_step()
        self._forget_ranks([rank for rank in self._queues if rank not in ranks])
        for rank in ranks:
            if rank not in self._queues or self._positions[rank].consumed != positions[rank].consumed:
                self._take_up(rank, positions[rank])
            self._queues[rank].until = None
        self.ranks = ranks
        self._queues = {rank: self._queues[rank] for rank in ranks}
        self._pump()
        return True

    def _forget_ranks(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            queue = self._queues.pop(rank)
            for asked in queue.asked:
                if asked.task is not None:
                    asked.task.wanted = False
            del self._positions[rank], self._indices[rank]
            self._later.discard(rank)

    def _take_up(self, rank: int, position: Position) -> None:
        self.workers.forget({(rank, number) for number in range(self._count)})
        self._positions[rank] = position
        self._first = max(position.consumed, 1)
        self.resume(rank)

    # Beginning and end of a loop.

    def start(self, rank: int) -> None:
        position = self._positions[rank]
        persists = position.base_seed is not None
        queue = self._queues[rank] = _Queue(latest=dict(position.pairs))
        if persists:
            self._later.add(rank)
            self._finish_left_over(rank, position)
            queue.latest = {
                number: replace(pair, batches=0, ended=False, origin=(pair.rng, pair.held))
                for number, pair in queue.latest.items()
            }
            self.workers.forget({(rank, number) for number in range(self._count)})
            self._set(rank, pairs=dict(queue.latest), left_over=())
        else:
            self._later.discard(rank)
        super().start(rank)

    def _finish_left_over(self, rank: int, position: Position) -> None:
        """Persistent data workers finish what they were asked for, although nobody wants it any more."""
        self._later.discard(rank)
        if position.left_over:
            self.workers.forget({(rank, number) for number in range(self._count)})
        for worker, index in position.left_over:
            asked = _Asked(worker, index)
            self._submit(rank, asked)
            assert asked.task is not None
            self.workers.wait(asked.task)
        self._later.add(rank)

    def _started(self, rank: int) -> None:
        for _ in range(self._window):
            self._ask(rank)

    def _resumed(self, rank: int, ahead: list[Any]) -> None:
        position = self._positions[rank]
        queue = self._queues[rank] = _Queue(latest=dict(position.pairs), turn=position.turn)
        if any(pair.origin is not None for pair in position.pairs.values()):
            self._later.add(rank)
        for index in ahead:
            self._assign(queue, index)
        if not self.loader.has_sampler:
            for _ in range(self._window):
                self._ask(rank)

    def _persists_from_before(self, rank: int) -> bool:
        return any(pair.origin is not None for pair in self._positions[rank].pairs.values())

    def end_loop(self) -> None:
        self._forget_step()
        if self.started and not self.loader.persistent_workers:
            self._positions = {rank: self._after_loop(rank) for rank in self.ranks}
            self.close()
        elif self.started:
            for rank, queue in self._queues.items():
                for asked in queue.asked:
                    if asked.task is not None:
                        asked.task.wanted = False
                left = tuple((asked.worker, asked.index) for asked in queue.asked)
                self._set(rank, sampler=self._after_loop(rank).sampler, consumed=0, turn=0, left_over=left)
        self._queues = {}
        self.started = False

    def position(self, rank: int) -> Position:
        position = super().position(rank)
        if self.started and position.sampler is not None:
            ahead = tuple(asked.index for asked in self._queues[rank].asked)
            position = replace(
                position, sampler=replace(position.sampler, ahead=ahead if _is_plain(ahead) else None)
            )
        return position

    def warm_up(self) -> None:
        assert self.workers

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    # Steps.

    def begin_step(self) -> None:
        self._forget_step()
        self.samples = 0
        self._pump()

    def _forget_step(self) -> None:
        for task in self._repeated.values():
            task.wanted = False
        self._step.clear()
        self._kept.clear()
        self._repeated.clear()

    def available(self, rank: int, count: int) -> int:
        if not self.loader.iterable:
            return min(count, len(self._queues[rank].asked))
        for (
            other,
            queue,
        ) in self._queues.items():  # all have to be there before the step: let all be made at once
            while queue.under_way < min(count, len(queue.asked)):
                self._give(other)
        queue = self._queues[rank]
        there = 0
        while there < count:
            if there == len(queue.asked) and not self._ask(rank):
                break
            asked = queue.asked[there]
            if self._answer(rank, there).ended:
                self._drop(rank, there, asked)
            else:
                there += 1
        return there

    def fetch(self, rank: int, number: int) -> Any:
        queue = self._queues[rank]
        if not queue.asked:
            raise ran_out(rank, self._positions[rank].consumed)
        answer = self._answer(rank, 0)
        asked = queue.asked.popleft()
        queue.under_way -= 1
        position = self._positions[rank]
        self._set(
            rank,
            consumed=position.consumed + 1,
            turn=(asked.worker + 1) % self._count,
            pairs={**position.pairs, asked.worker: asked.after},
        )
        asked.task = None
        self._step[rank, number] = asked
        self._ask(rank)
        self._pump()
        if answer.error is not None:
            answer.error.reraise()
        if self.loader.iterable:
            self._kept[rank, number] = answer.batch
        self.samples += answer.samples
        return self._pinned(answer.batch)

    def again(self, rank: int, number: int) -> Any:
        if self.loader.iterable:  # it cannot be asked for the same once more
            return self._pinned(self._kept[rank, number])
        order = list(self._step)
        here = order.index((rank, number))
        for key in order[here : here + self._window]:
            if key not in self._repeated:
                self._repeated[key] = self._repeat(key[0], self._step[key])
        answer = self.workers.wait(self._repeated.pop((rank, number)))
        if answer.error is not None:
            answer.error.reraise()
        return self._pinned(answer.batch)

    # What is asked and answered.

    def _ask(self, rank: int) -> bool:
        """Take the next index, as a DataLoader does when a batch has been consumed."""
        try:
            index = self._take(rank)
        except StopIteration:
            return False
        return self._assign(self._queues[rank], index)

    def _assign(self, queue: _Queue, index: Any) -> bool:
        """The data workers take turns; one whose dataset has ended is left out."""
        for _ in range(self._count):
            worker, queue.turn = queue.turn, (queue.turn + 1) % self._count
            if worker not in queue.latest or not queue.latest[worker].ended:
                queue.asked.append(_Asked(worker, index))
                return True
        return False

    def _drop(self, rank: int, place: int, ended: _Asked) -> None:
        """A data worker's dataset has ended: what else it was asked for will not come."""
        queue = self._queues[rank]
        del queue.asked[place]
        queue.under_way -= 1
        for asked in [asked for asked in queue.asked if asked.worker == ended.worker and asked.task is None]:
            queue.asked.remove(asked)
        self._set(rank, pairs={**self._positions[rank].pairs, ended.worker: ended.after})
        self._ask(rank)

    def _pump(self) -> None:
        """Give the processes work, in the order in which it will be consumed."""
        under_way = sum(queue.under_way for queue in self._queues.values())
        # A step over an iterable dataset begins when all its micro-batches are there: the next one is prepared beside them.
        one_step = len(self._queues) * self._accumulate if self.loader.iterable else 0
        while under_way < self._window + one_step:
            waiting = [
                ((self._positions[rank].consumed + queue.under_way) // self._accumulate, place, rank)
                for place, (rank, queue) in enumerate(self._queues.items())
                if queue.under_way < len(queue.asked)
                and (queue.until is None or self._positions[rank].consumed + queue.under_way < queue.until)
            ]
            if not waiting:
                return
            self._give(min(waiting)[2])
            under_way += 1

    def _give(self, rank: int) -> None:
        queue = self._queues[rank]
        self._submit(rank, queue.asked[queue.under_way])
        queue.under_way += 1

    def _answer(self, rank: int, place: int) -> BatchReply:
        queue = self._queues[rank]
        while queue.under_way <= place:
            self._give(rank)
        task = queue.asked[place].task
        assert task is not None
        return self.workers.wait(task)

    def _submit(self, rank: int, asked: _Asked) -> None:
        def request(unknown: bool) -> BatchRequest:
            start = self._start(rank, asked.worker) if unknown else None
            return BatchRequest(index=asked.index, rank=rank, worker=asked.worker, start=start)

        latest = self._queues[rank].latest

        def received(answer: BatchReply) -> None:
            _commit(latest, asked, answer)

        asked.task = Task(
            process=(rank + asked.worker) % self._count,
            request=request,
            pair=(rank, asked.worker),
            received=received,
        )
        self.workers.submit(asked.task)

    def _start(self, rank: int, worker: int) -> StartDataWorker:
        base_seed = self._positions[rank].base_seed
        assert base_seed is not None
        state = self._queues[rank].latest.get(worker)
        new = rank in self._later and state is not None and state.batches == 0 and not state.ended
        return StartDataWorker(base_seed=base_seed, state=state, new_iteration=new)

    def _repeat(self, rank: int, asked: _Asked) -> Task:
        def request(unknown: bool) -> BatchRequest:
            start = self._start(rank, asked.worker) if unknown else None
            return BatchRequest(
                index=asked.index, rank=rank, worker=asked.worker, start=start, at=asked.before
            )

        task = Task(process=(rank + asked.worker) % self._count, request=request, pair=(rank, asked.worker))
        self.workers.submit(task)
        return task

    def _pinned(self, batch: Any) -> Any:
        return torch_internals.pinned(batch) if self.loader.pins else batch


def _commit(latest: dict[int, PairState], asked: _Asked, answer: BatchReply) -> None:
    """An answer has come: note the state of its data worker before and after."""
    before = latest.get(asked.worker)
    if answer.began is not None:
        rng, held = answer.began
        before = PairState(rng=rng, held=held) if before is None else replace(before, rng=rng, held=held)
    assert before is not None
    asked.before = before
    asked.after = latest[asked.worker] = replace(
        before,
        rng=before.rng.changed(answer.rng),
        held=answer.held,
        batches=before.batches + (not answer.ended),
        ended=answer.ended,
    )


def _is_plain(index: Any) -> bool:
    """It can be part of a context."""
    if type(index) in (list, tuple):
        return all(map(_is_plain, index))
    return type(index) in (*PLAIN, torch.Tensor, np.ndarray)


def make_batch_source(loader: OrderedLoader, ranks: Sequence[int], streams: Streams) -> BatchSource:
    return (SharedBatchSource if loader.num_workers else DirectBatchSource)(loader, ranks, streams)
