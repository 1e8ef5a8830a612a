"""Shards for a job of virtual workers: `job.shards(…)` makes a loader that `job.steps` takes.

Every virtual worker pulls a shard when it needs one. Steps are synchronous: each virtual worker consumes a micro-batch per
step. So all workers keep equal queues, and each computes what all virtual workers pull, in the order of their ranks: nothing
is sent, and the samples of a step depend on neither placement nor time. The job tracks the queues: a checkpoint holds them as
they were at its boundary.

How many samples each virtual worker sees in a step is `UnevenOrder`'s rule; which ones, that of `shards/queues.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.data.bijection import Bijection
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.options import is_made_per_rank, make_loader
from gyrostat.data.order import EpochOrder, UnevenOrder
from gyrostat.data.shards.layout import ShardLayout
from gyrostat.data.shards.messages import AskShard, EpochOver, ShardReport, WaitForShard
from gyrostat.data.shards.queues import Queues

_NOW = 0.0  # virtual workers are neither slow nor silent: time plays no role


class StepShards:
    """The queues of a job, planned ahead as far as requested, and committed step by step."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._in_hand: dict[str, list[int]] = {}
        """By virtual worker: lease, start, stop and offset of its shard."""
        self._plans: dict[int, list[list[range]]] = {}
        """Of planned steps: the samples of each virtual worker."""
        self._states: dict[int, dict[str, Any]] = {}
        """Of planned steps: the state after them, by the number of steps done then."""
        self._planned = 0
        self._order: ShardOrder | None = None
        self._committed = self._state()

    def ranges(self, order: ShardOrder, rank: int, batch: int) -> list[range]:
        """The samples of one micro-batch."""
        if order is not self._order:
            self._begin(order, batch)
        while self._planned <= batch:
            shares = order.shares(self._planned)
            self._plans[self._planned] = [
                self._pull(str(r), shares[r], order.epoch) for r in range(len(shares))
            ]
            self._planned += 1
            self._states[self._planned] = self._state()
        return self._plans[batch][rank]

    def done(self, batches: int) -> None:
        """`batches` steps of the epoch are trained: commit the state after them."""
        self._committed = self._states[batches]
        for batch in [batch for batch in self._plans if batch < batches]:
            del self._plans[batch], self._states[batch + 1]

    def state_dict(self) -> dict[str, Any]:
        return self._committed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._queues.restore(state["queues"], now=_NOW)
        self._in_hand = {
            worker: [lease, start, stop, offset]
            for lease, worker, start, stop, offset in state["queues"]["doing"]
        }
        self._plans, self._states, self._planned = {}, {}, state["batches"]
        self._order = None
        self._committed = dict(state)

    def _begin(self, order: ShardOrder, batch: int) -> None:
        """Begin a `job.steps` loop, or resume it where its checkpoint was taken."""
        self.load_state_dict(self._committed)  # discards what was planned beyond the end of a loop
        if batch == 0:
            self._queues.begin_epoch(order.epoch)
            self._in_hand, self._planned = {}, 0
        elif (self._queues.epoch, self._planned) != (order.epoch, batch):
            raise Misuse(
                f"step {batch} of epoch {order.epoch} is to be trained, but its shards are at step {self._planned} of "
                f"epoch {self._queues.epoch}: the checkpoint is of another script"
            )
        self._order = order

    def _pull(self, worker: str, samples: int, epoch: int) -> list[range]:
        """`samples` samples of the present shard, and of the next ones if it has too few."""
        pulled = []
        while samples:
            if worker not in self._in_hand:
                self._in_hand[worker] = self._ask(worker, epoch)
            lease, start, stop, offset = hand = self._in_hand[worker]
            taken = min(samples, stop - start - offset)
            pulled.append(range(start + offset, start + offset + taken))
            samples -= taken
            hand[3] += taken
            self._queues.report(ShardReport(worker, self._queues.term, ((lease, hand[3]),)), _NOW)
            if start + hand[3] == stop:
                del self._in_hand[worker]
        return pulled

    def _ask(self, worker: str, epoch: int) -> list[int]:
        """The next shard. If all are taken, the virtual worker with the most samples left returns its shard to the queue."""
        answer = self._queues.ask(AskShard(worker, epoch), _NOW)
        while isinstance(answer, WaitForShard):
            fullest = max(self._in_hand, key=lambda other: self._left(other))
            del self._in_hand[fullest]
            self._queues.release(fullest, f"needed by virtual worker {worker}")
            answer = self._queues.ask(AskShard(worker, epoch), _NOW)
        assert not isinstance(answer, EpochOver)  # the steps have as many samples as the epoch
        return [answer.lease, answer.start, answer.stop, 0]

    def _left(self, worker: str) -> int:
        _, start, stop, offset = self._in_hand[worker]
        return stop - start - offset

    def _state(self) -> dict[str, Any]:
        return {"batches": self._planned, "queues": self._queues.to_state()}


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardOrder(UnevenOrder):
    """The order of samples that follows from the queues. Samples are shuffled within a shard, too."""

    queues: StepShards
    layout: ShardLayout

    def indices(self, rank: int, batch: int) -> list[int]:
        ranges = self.queues.ranges(self, rank, batch)
        if not self.shuffle:
            return [index for samples in ranges for index in samples]
        return [index for samples in ranges for index in self._shuffled(samples)]

    def _shuffled(self, samples: range) -> list[int]:
        shard = self.layout.shard_of(samples.start)
        first, last = self.layout.bounds(shard)
        order = _within_shard(last - first, self.seed, self.epoch, shard)
        return [first + place for place in order.take(range(samples.start - first, samples.stop - first))]


@lru_cache(maxsize=64)
def _within_shard(length: int, seed: int, epoch: int, shard: int) -> Bijection:
    return Bijection(length, seed, epoch, shard)


@dataclass(frozen=True, kw_only=True)
class ShardLoader(OrderedLoader):
    """A loader whose virtual workers pull shards."""

    layout: ShardLayout
    queues: StepShards = field(compare=False)

    def _order(self, *, seed: int, epoch: int) -> ShardOrder:
        order = super()._order(seed=seed, epoch=epoch)
        return ShardOrder(**_fields_of(order), queues=self.queues, layout=self.layout)


def make_shard_loader(
    dataset: Dataset[Any],
    *,
    batch_size: Any,
    shard_size: int,
    virtual_workers: int,
    seed: int,
    shuffle: bool,
    num_workers: int,
    drop_last: bool,
    pin_memory: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    others: dict[str, Any],
    number: int = 0,
) -> ShardLoader:
    """Check the user's options and make the loader."""
    if not isinstance(shuffle, bool):
        raise UsageError(f"shuffle={shuffle!r}: give True to shuffle shards, or False to keep their order")
    for name in ("sampler", "batch_sampler"):
        if others.get(name) is not None:
            raise UsageError(
                f"job.shards decides the order of samples, so {name} cannot be used; use job.dataloader"
            )
    if isinstance(dataset, IterableDataset) or is_made_per_rank(dataset):
        raise UsageError(
            f"job.shards needs one dataset with __len__ and __getitem__ for all virtual workers, got {dataset!r}"
        )
    ordered = make_loader(
        dataset,
        batch_size=batch_size if isinstance(batch_size, (list, tuple)) else [batch_size] * virtual_workers,
        virtual_workers=virtual_workers,
        shuffle=shuffle,
        num_workers=num_workers,
        drop_last=drop_last,
        pad=False,
        pin_memory=pin_memory,
        collate_fn=collate_fn,
        others=others,
        number=number,
    )
    assert ordered.batch_size is not None
    layout = ShardLayout.of_indices(ordered.length, shard_size)
    queues = Queues(layout, seed=seed, shuffle=shuffle, grain=ordered.batch_size)
    return ShardLoader(**_fields_of(ordered), layout=layout, queues=StepShards(queues))


def _fields_of(value: OrderedLoader | EpochOrder) -> dict[str, Any]:
    return {part.name: getattr(value, part.name) for part in fields(value)}
