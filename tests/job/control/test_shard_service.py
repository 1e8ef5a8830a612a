"""Shards served by a leader: exactly once, whoever asks twice, falls silent, or has to do with another leader."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.data.shards.messages import Shard
from gyrostat.job.control.shard_service import OpenShards, Pulled, PullShard, QueuesRecord, ShardService

OPENED = OpenShards("train", 100, 10, seed=3)


def opened(request: OpenShards = OPENED) -> ShardService:
    backend = ShardService()
    assert backend.open(request) is None
    return backend


def successor(backend: ShardService, now: float) -> ShardService:
    """The next leader's, from what was kept."""
    kept = msgspec.msgpack.encode(backend.record())
    return ShardService.restore(msgspec.msgpack.decode(kept, type=dict[str, QueuesRecord]), now)


def test_queues_are_opened_once() -> None:
    backend = opened()
    assert backend.open(OPENED) is None
    assert "is open with other values" in str(backend.open(OpenShards("train", 99, 10, seed=3)))
    assert backend.open(OpenShards("other", 7, 2)) is None
    assert backend.open(OpenShards("wrong", 7, 0)) is not None


def test_a_repeated_request_gets_the_same_reply() -> None:
    backend = opened()
    first = backend.pull(PullShard("train", "a", 0, epoch=0), 0.0)
    assert first.shard is not None
    assert backend.pull(PullShard("train", "a", 0, epoch=0), 1.0) == first
    assert successor(backend, 2.0).pull(PullShard("train", "a", 0, epoch=0), 2.0) == first
    report = PullShard("train", "a", 1, epoch=0, offsets=((first.shard.lease, len(first.shard)),))
    second = backend.pull(report, 3.0)
    assert second.accepted
    assert backend.pull(report, 4.0) == second
    late = backend.pull(PullShard("train", "a", 0, epoch=0), 5.0)
    assert (late.accepted, late.reason) == (False, "request 0 comes after 1, which is answered already")


def test_what_cannot_be_answered_says_why() -> None:
    backend = opened()
    assert backend.pull(PullShard("nothing", "a", 0, epoch=0), 0.0) == Pulled(
        False, "there are no queues named 'nothing': open them first"
    )
    early = backend.pull(PullShard("train", "a", 0, epoch=1), 0.0)
    assert "epoch 0 is not over" in early.reason
    wrong = backend.pull(PullShard("train", "a", 1, epoch=0, offsets=((77, 1),)), 0.0)
    assert not wrong.accepted
    assert wrong.shard is None


def test_a_worker_that_leaves_returns_its_shard() -> None:
    backend = opened(OpenShards("train", 10, 10))
    held = backend.pull(PullShard("train", "a", 0, epoch=0), 0.0).shard
    assert held is not None
    assert backend.pull(PullShard("train", "b", 0, epoch=0), 0.0).wait
    assert backend.pull(PullShard("train", "a", 1, epoch=None, leaves=True), 0.0) == Pulled(True)
    again = backend.pull(PullShard("train", "b", 1, epoch=0), 1.0).shard
    assert again is not None
    assert (again.start, again.stop) == (held.start, held.stop)
    end = PullShard("train", "b", 2, epoch=0, offsets=((again.lease, len(again)),))
    assert backend.pull(end, 2.0) == Pulled(True, epoch_over=True)


def test_a_worker_that_stops_reporting_loses_its_shard() -> None:
    backend = opened(OpenShards("train", 10, 10, lease_seconds=5.0))
    held = backend.pull(PullShard("train", "a", 0, epoch=0), 0.0).shard
    assert held is not None
    assert backend.pull(PullShard("train", "b", 0, epoch=0), 6.0).shard is not None
    late = backend.pull(PullShard("train", "a", 1, epoch=0, offsets=((held.lease, 10),)), 7.0)
    assert not late.accepted


@settings(deadline=None)
@given(data=st.data())
def test_every_sample_exactly_once(data: st.DataObject) -> None:
    """Under repeated requests, lost answers and new leaders, and workers that are silent for too long or die."""
    backend = opened(OpenShards("train", 60, 7, seed=1, lease_seconds=20.0))
    trained: Counter[int] = Counter()
    workers = [_Worker(str(number)) for number in range(3)]
    now = 0.0
    for happens in data.draw(
        st.lists(st.sampled_from(["pull", "pull", "new leader", "a pause", "death"]), max_size=40)
    ):
        worker = data.draw(st.sampled_from(workers))
        now += 30.0 if happens == "a pause" else 1.0
        if happens == "death":
            worker.name, worker.number, worker.shard = f"{worker.name}'", 0, None
        request = worker.request()
        answer = backend.pull(request, now)
        if happens == "new leader":
            backend = successor(backend, now)
            assert backend.pull(request, now) == answer
        trained.update(worker.take(answer))
    while not (answer := backend.pull(workers[0].request(), now)).epoch_over:
        trained.update(workers[0].take(answer))
        now += 30.0 if answer.wait else 1.0
    trained.update(workers[0].take(answer))
    assert trained == Counter(range(60))


@dataclass
class _Worker:
    name: str
    number: int = 0
    shard: Shard | None = None

    def request(self) -> PullShard:
        """Reports what it holds as done, and asks for more."""
        self.number += 1
        offsets = () if self.shard is None else ((self.shard.lease, len(self.shard)),)
        return PullShard("train", self.name, self.number, epoch=0, offsets=offsets)

    def take(self, answer: Pulled) -> range:
        """The samples whose update holds."""
        held, self.shard = self.shard, answer.shard
        return range(held.start, held.stop) if held is not None and answer.accepted else range(0)
