"""The queue of one virtual worker: data workers take turns, and one whose dataset has ended is left out."""

from __future__ import annotations

from gyrostat.data.position import DataWorkerState
from gyrostat.data.prefetch_queue import PrefetchQueue
from gyrostat.data.rng import Streams
from gyrostat.data.virtual_data_worker import BatchReply


def test_data_workers_take_turns() -> None:
    queue = PrefetchQueue()
    assert all(queue.plan(index, workers=3) for index in range(5))
    assert [(batch.worker, batch.index) for batch in queue.batches] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (0, 3),
        (1, 4),
    ]
    assert queue.turn == 2


def test_a_reply_commits_the_states_before_and_after_the_batch() -> None:
    rng = Streams().save()
    queue = PrefetchQueue()
    queue.plan(7, workers=1)
    first = queue.batches[0]
    queue.commit(first, BatchReply(rng=(None, None, None), began=(rng, None)))
    assert first.before == DataWorkerState(rng=rng)
    assert first.after is queue.latest[0]
    assert queue.latest[0].batches == 1


def test_a_data_worker_whose_dataset_has_ended_is_left_out() -> None:
    rng = Streams().save()
    queue = PrefetchQueue()
    for index in range(4):
        queue.plan(index, workers=2)
    queue.submitted = 2
    queue.commit(queue.batches[0], BatchReply(ended=True, rng=(None, None, None), began=(rng, None)))
    assert queue.drop_ended(0).worker == 0
    assert [batch.worker for batch in queue.batches] == [1, 1]
    assert queue.submitted == 1
    assert queue.plan(4, workers=2)
    assert queue.batches[-1].worker == 1
    queue.latest[1] = DataWorkerState(rng=rng, ended=True)
    assert not queue.plan(5, workers=2)
