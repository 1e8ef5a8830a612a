"""One virtual worker's queue of batches that its DataLoader would have requested from its own data workers.

A `PlannedBatch` is an index and the data worker that makes it. The first `submitted` ones of a queue are tasks of a process
(`workers.py`); `shared_source.py` decides when to submit the next one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from gyrostat.data.position import DataWorkerState
from gyrostat.data.virtual_data_worker import BatchReply
from gyrostat.data.workers import Task


@dataclass(eq=False)
class PlannedBatch:
    """A batch of one virtual worker, from the choice of its index until it is consumed."""

    worker: int
    """The number of the data worker that makes it."""
    index: Any
    task: Task | None = None
    before: DataWorkerState | None = None
    after: DataWorkerState | None = None
    """The states of its data worker before and after it, when the reply has arrived."""

    def cancel(self) -> None:
        if self.task is not None:
            self.task.wanted = False


@dataclass(eq=False)
class PrefetchQueue:
    """The planned batches of one virtual worker, in the order in which they are consumed."""

    batches: deque[PlannedBatch] = field(default_factory=deque)
    turn: int = 0
    """The data worker that gets the next index."""
    latest: dict[int, DataWorkerState] = field(default_factory=dict)
    """By data worker: its state after its last reply."""
    submitted: int = 0
    """How many batches, from the head of the queue, are tasks of a process."""
    stop_at: int | None = None
    """The virtual worker moves away before this micro-batch."""

    def plan(self, index: Any, workers: int) -> bool:
        """Give an index to the next data worker in turn, leaving out those whose dataset has ended. False: all have."""
        for _ in range(workers):
            worker, self.turn = self.turn, (self.turn + 1) % workers
            if worker not in self.latest or not self.latest[worker].ended:
                self.batches.append(PlannedBatch(worker, index))
                return True
        return False

    def drop_ended(self, place: int) -> PlannedBatch:
        """The dataset of a data worker has ended at this place: remove its planned batches. Returns the one at `place`."""
        ended = self.batches[place]
        del self.batches[place]
        self.submitted -= 1
        for batch in [batch for batch in self.batches if batch.worker == ended.worker and batch.task is None]:
            self.batches.remove(batch)
        return ended

    def cancel(self) -> None:
        """No batch of the queue is needed any more."""
        for batch in self.batches:
            batch.cancel()

    def commit(self, batch: PlannedBatch, reply: BatchReply) -> None:
        """Record the states of a batch's data worker before and after it."""
        before = self.latest.get(batch.worker)
        if reply.began is not None:
            rng, replica = reply.began
            before = replace(before or DataWorkerState(rng=rng), rng=rng, replica=replica)
        assert before is not None
        batch.before = before
        batch.after = self.latest[batch.worker] = replace(
            before,
            rng=before.rng.changed(reply.rng),
            replica=reply.replica,
            batches=before.batches + (not reply.ended),
            ended=reply.ended,
        )
