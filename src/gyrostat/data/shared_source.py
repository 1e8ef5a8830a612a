"""Micro-batches made ahead by data workers that all virtual workers of this worker share.

Every virtual worker r has a `PrefetchQueue` of the batches that its DataLoader would have requested from its own data workers:
`prefetch_factor` times `num_workers` indices, taken when torch would take them. The heads of these queues, in the order in
which training consumes them, are submitted to the processes (`workers.py`): `prefetch_factor` times `num_workers` batches in
all, for any number of virtual workers. Process (r + j) mod `num_workers` runs data worker j of virtual worker r, so that each
process has one data worker of every virtual worker, and all of them have work within a step.

Every reply brings the state of data worker (r, j) after it. The state is committed to r's position when the batch is consumed;
until then a process that has to be replaced resumes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gyrostat.data.batch_source import BatchSource, DirectBatchSource, too_few_batches
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.object_copy import PLAIN
from gyrostat.data.position import DataWorkerState, Position
from gyrostat.data.prefetch_queue import PlannedBatch, PrefetchQueue
from gyrostat.data.rng import Streams
from gyrostat.data.virtual_data_worker import BatchReply, BatchRequest, StartDataWorker
from gyrostat.data.workers import DataWorkerPool, Task


class SharedBatchSource(BatchSource):
    """Has data workers make the batches ahead."""

    draws_here = False

    def __init__(self, loader: OrderedLoader, ranks: Sequence[int], streams: Streams) -> None:
        super().__init__(loader, ranks, streams)
        self._count = loader.num_workers
        self._window = loader.prefetch_factor * loader.num_workers
        self._workers: DataWorkerPool | None = None
        self._queues: dict[int, PrefetchQueue] = {}
        self._persistent: set[int] = set()
        """Virtual workers whose data workers persist from an earlier iteration."""
        self._step: dict[tuple[int, int], PlannedBatch] = {}
        """Batches of this step, by rank and number."""
        self._kept: dict[tuple[int, int], Any] = {}
        """Their contents, where they cannot be made again."""
        self._repeated: dict[tuple[int, int], Task] = {}
        """Tasks that make them again."""

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
        """Whether virtual workers can move in the middle of the loop, with positions that are known ahead.

        A sampler draws at every batch, from streams that are not known ahead; datasets of ranks are in the processes.
        """
        return self.started and self._order is not None and self.loader.ordered

    def leave_at(self, rank: int, batch: int) -> Position | None:
        if not self._can_move:
            return None
        self._queues[rank].stop_at = batch
        self.workers.receive_ready()
        position = self.position(rank)
        ahead = batch - position.consumed
        before = list(self._queues[rank].batches)[: max(ahead, 0)]
        if ahead < 0 or len(before) < ahead or any(one.after is None for one in before):
            return None
        states = dict(position.data_workers) | {
            one.worker: one.after for one in before if one.after is not None
        }
        turn = (before[-1].worker + 1) % self._count if before else position.turn
        return replace(position, consumed=batch, data_workers=states, turn=turn)

    def expect(self, rank: int, position: Position) -> None:
        if self._can_move and rank not in self._queues:
            self._adopt(rank, position)
            self._fill_window()

    def call_off(self) -> None:
        if self._can_move:
            self._forget_ranks([rank for rank in self._queues if rank not in self.ranks])
            for queue in self._queues.values():
                queue.stop_at = None
            self._fill_window()

    def rehost(self, ranks: Sequence[int], positions: Mapping[int, Position]) -> bool:
        if not self._can_move:
            return False
        self._forget_step()
        self._forget_ranks([rank for rank in self._queues if rank not in ranks])
        for rank in ranks:
            if rank not in self._queues or self._positions[rank].consumed != positions[rank].consumed:
                self._adopt(rank, positions[rank])
            self._queues[rank].stop_at = None
        self.ranks = ranks
        self._queues = {rank: self._queues[rank] for rank in ranks}
        self._fill_window()
        return True

    def _forget_ranks(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._queues.pop(rank).cancel()
            del self._positions[rank], self._indices[rank]
            self._persistent.discard(rank)

    def _adopt(self, rank: int, position: Position) -> None:
        self.workers.forget({(rank, number) for number in range(self._count)})
        self._positions[rank] = position
        self._first_batch = max(position.consumed, 1)
        self.resume(rank)

    # Beginning and end of a loop.

    def start(self, rank: int) -> None:
        position = self._positions[rank]
        persists = position.base_seed is not None
        queue = self._queues[rank] = PrefetchQueue(latest=dict(position.data_workers))
        if persists:
            self._persistent.add(rank)
            self._finish_left_over(rank, position)
            queue.latest = {
                number: replace(state, batches=0, ended=False, origin=(state.rng, state.replica))
                for number, state in queue.latest.items()
            }
            self.workers.forget({(rank, number) for number in range(self._count)})
            self._update(rank, data_workers=dict(queue.latest), left_over=())
        else:
            self._persistent.discard(rank)
        super().start(rank)

    def _finish_left_over(self, rank: int, position: Position) -> None:
        """Persistent data workers finish the requests of the last loop, although their batches are not needed."""
        self._persistent.discard(rank)
        if position.left_over:
            self.workers.forget({(rank, number) for number in range(self._count)})
        for worker, index in position.left_over:
            batch = PlannedBatch(worker, index)
            self._submit(rank, batch)
            assert batch.task is not None
            self.workers.wait(batch.task)
        self._persistent.add(rank)

    def _started(self, rank: int) -> None:
        for _ in range(self._window):
            self._plan_next(rank)

    def _resumed(self, rank: int, ahead: list[Any]) -> None:
        position = self._positions[rank]
        queue = self._queues[rank] = PrefetchQueue(latest=dict(position.data_workers), turn=position.turn)
        if self._persists_from_before(rank):
            self._persistent.add(rank)
        for index in ahead:
            queue.plan(index, self._count)
        if not self.loader.has_sampler:
            for _ in range(self._window):
                self._plan_next(rank)

    def _persists_from_before(self, rank: int) -> bool:
        return any(state.origin is not None for state in self._positions[rank].data_workers.values())

    def end_loop(self) -> None:
        self._forget_step()
        if self.started and not self.loader.persistent_workers:
            self._positions = {rank: self._after_loop(rank) for rank in self.ranks}
            self.close()
        elif self.started:
            for rank, queue in self._queues.items():
                queue.cancel()
                left = tuple((batch.worker, batch.index) for batch in queue.batches)
                self._update(rank, sampler=self._after_loop(rank).sampler, consumed=0, turn=0, left_over=left)
        self._queues = {}
        self.started = False

    def position(self, rank: int) -> Position:
        position = super().position(rank)
        if self.started and position.sampler is not None:
            ahead = tuple(batch.index for batch in self._queues[rank].batches)
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
        self._fill_window()

    def _forget_step(self) -> None:
        for task in self._repeated.values():
            task.wanted = False
        self._step.clear()
        self._kept.clear()
        self._repeated.clear()

    def available(self, rank: int, count: int) -> int:
        if not self.loader.iterable:
            return min(count, len(self._queues[rank].batches))
        # The step needs the batches of all virtual workers: let them be made at the same time.
        for other, queue in self._queues.items():
            while queue.submitted < min(count, len(queue.batches)):
                self._submit_next(other)
        queue = self._queues[rank]
        found = 0
        while found < count:
            if found == len(queue.batches) and not self._plan_next(rank):
                break
            if self._wait_for(rank, found).ended:
                self._drop_ended(rank, found)
            else:
                found += 1
        return found

    def fetch(self, rank: int, number: int) -> Any:
        queue = self._queues[rank]
        if not queue.batches:
            raise too_few_batches(rank, self._positions[rank].consumed)
        reply = self._wait_for(rank, 0)
        batch = queue.batches.popleft()
        queue.submitted -= 1
        position = self._positions[rank]
        self._update(
            rank,
            consumed=position.consumed + 1,
            turn=(batch.worker + 1) % self._count,
            data_workers={**position.data_workers, batch.worker: batch.after},
        )
        batch.task = None
        self._step[rank, number] = batch
        self._plan_next(rank)
        self._fill_window()
        if reply.error is not None:
            reply.error.reraise()
        if self.loader.iterable:
            self._kept[rank, number] = reply.batch
        self.samples += reply.samples
        return self._pinned(reply.batch)

    def again(self, rank: int, number: int) -> Any:
        if self.loader.iterable:  # the same batch cannot be made again
            return self._pinned(self._kept[rank, number])
        order = list(self._step)
        here = order.index((rank, number))
        for key in order[here : here + self._window]:
            if key not in self._repeated:
                self._repeated[key] = self._submit_again(key[0], self._step[key])
        reply = self.workers.wait(self._repeated.pop((rank, number)))
        if reply.error is not None:
            reply.error.reraise()
        return self._pinned(reply.batch)

    # Requests and replies.

    def _plan_next(self, rank: int) -> bool:
        """Take the next index, as a DataLoader does when a batch has been consumed. False: there is none."""
        try:
            index = self._next_index(rank)
        except StopIteration:
            return False
        return self._queues[rank].plan(index, self._count)

    def _drop_ended(self, rank: int, place: int) -> None:
        """A data worker's dataset has ended: commit its state, and plan another batch in its place."""
        ended = self._queues[rank].drop_ended(place)
        self._update(rank, data_workers={**self._positions[rank].data_workers, ended.worker: ended.after})
        self._plan_next(rank)

    def _fill_window(self) -> None:
        """Submit batches to the processes, in the order in which they are consumed."""
        submitted = sum(queue.submitted for queue in self._queues.values())
        # A step over an iterable dataset begins when all its micro-batches exist: prefetch the next step beside them.
        one_step = len(self._queues) * self._accumulate if self.loader.iterable else 0
        while submitted < self._window + one_step:
            waiting = [
                ((self._positions[rank].consumed + queue.submitted) // self._accumulate, place, rank)
                for place, (rank, queue) in enumerate(self._queues.items())
                if queue.submitted < len(queue.batches)
                and (
                    queue.stop_at is None or self._positions[rank].consumed + queue.submitted < queue.stop_at
                )
            ]
            if not waiting:
                return
            self._submit_next(min(waiting)[2])
            submitted += 1

    def _submit_next(self, rank: int) -> None:
        queue = self._queues[rank]
        self._submit(rank, queue.batches[queue.submitted])
        queue.submitted += 1

    def _wait_for(self, rank: int, place: int) -> BatchReply:
        """The reply for the batch at this place of the queue."""
        queue = self._queues[rank]
        while queue.submitted <= place:
            self._submit_next(rank)
        task = queue.batches[place].task
        assert task is not None
        return self.workers.wait(task)

    def _submit(self, rank: int, batch: PlannedBatch) -> None:
        queue = self._queues[rank]
        batch.task = self._task(rank, batch, received=lambda reply: queue.commit(batch, reply))
        self.workers.submit(batch.task)

    def _submit_again(self, rank: int, batch: PlannedBatch) -> Task:
        """Have a batch of this step made again, under the state before it."""
        task = self._task(rank, batch, at=batch.before)
        self.workers.submit(task)
        return task

    def _task(
        self,
        rank: int,
        batch: PlannedBatch,
        *,
        at: DataWorkerState | None = None,
        received: Callable[[BatchReply], None] | None = None,
    ) -> Task:
        def request(unknown: bool) -> BatchRequest:
            start = self._start(rank, batch.worker) if unknown else None
            return BatchRequest(index=batch.index, rank=rank, worker=batch.worker, start=start, at=at)

        return Task(
            process=(rank + batch.worker) % self._count,
            request=request,
            data_worker=(rank, batch.worker),
            received=received,
        )

    def _start(self, rank: int, worker: int) -> StartDataWorker:
        base_seed = self._positions[rank].base_seed
        assert base_seed is not None
        state = self._queues[rank].latest.get(worker)
        new = rank in self._persistent and state is not None and state.batches == 0 and not state.ended
        return StartDataWorker(base_seed=base_seed, state=state, new_iteration=new)


def _is_plain(index: Any) -> bool:
    """Whether it can be part of a context."""
    if type(index) in (list, tuple):
        return all(map(_is_plain, index))
    return type(index) in (*PLAIN, torch.Tensor, np.ndarray)


def make_batch_source(loader: OrderedLoader, ranks: Sequence[int], streams: Streams) -> BatchSource:
    """The source of micro-batches for these virtual workers."""
    return (SharedBatchSource if loader.num_workers else DirectBatchSource)(loader, ranks, streams)
