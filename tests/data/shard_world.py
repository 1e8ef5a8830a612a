"""A small world around the pure queues: workers that come, work, leave and die, and a model that counts its samples.

The model is one number per sample: how often that sample went into it. An update and its report hold together or not at all, as
an asynchronous job does it. Saves keep model and queues together, and a restart goes back to the last one. Whatever happens,
the model must have every sample once per epoch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from gyrostat.data.shards.layout import ShardLayout
from gyrostat.data.shards.messages import (
    AskShard,
    EpochOver,
    LeaveShards,
    ReportVerdict,
    Shard,
    ShardReport,
    WaitForShard,
)
from gyrostat.data.shards.queues import Queues

LEASE = 10.0


@dataclass
class Worker:
    """What a worker knows. It may be wrong about its shards: others may have taken them."""

    name: str
    epoch: int = 0
    shards: dict[int, tuple[Shard, int]] = field(default_factory=dict)


class World:
    def __init__(self, layout: ShardLayout, *, seed: int, epochs: int, grain: int = 1) -> None:
        self.layout, self.seed, self.epochs, self.grain = layout, seed, epochs, grain
        self.queues = self._queues(0)
        self.model = [0] * layout.samples
        self.now = 0.0
        self.terms = 0
        self.workers: list[Worker] = []
        self.zombies: list[Worker] = []
        """Believed to be dead or gone, and working on."""
        self._named = 0
        self.refused = 0
        self._first = dict(zip((part.source for part in layout.parts), layout._first_samples, strict=False))
        self.save()

    def _queues(self, term: int) -> Queues:
        return Queues(self.layout, seed=self.seed, grain=self.grain, lease_seconds=LEASE, term=term)

    # What can happen.

    def join(self) -> None:
        self.workers.append(Worker(f"w{self._named}", epoch=self.queues.epoch))
        self._named += 1

    def ask(self, worker: Worker) -> None:
        if worker.epoch >= self.epochs:
            return
        answer = self.queues.answer(AskShard(worker.name, worker.epoch), self.now)
        match answer:
            case Shard():
                assert len(answer) > 0
                worker.shards[answer.lease] = (answer, 0)
            case WaitForShard():
                assert self.queues.todo == 0
                assert self.queues.doing > 0
            case EpochOver():
                assert set(self.model) <= set(range(answer.epoch + 1, self.epochs + 1)), (
                    "not all were trained"
                )
                worker.epoch += 1
                worker.shards.clear()

    def work(self, worker: Worker, samples: int) -> bool:
        """Train on the next samples of the oldest shard, and report all that are held; whether the update held."""
        if not worker.shards:
            return False
        lease = next(iter(worker.shards))
        shard, offset = worker.shards[lease]
        samples = min(samples, len(shard) - offset)
        offsets = {held: done for held, (_, done) in worker.shards.items()} | {lease: offset + samples}
        verdict = self.queues.answer(ShardReport(worker.name, shard.term, tuple(offsets.items())), self.now)
        assert isinstance(verdict, ReportVerdict)
        if not verdict.accepted:
            self.refused += 1
            worker.shards.clear()
            return False
        first = self._first[shard.source] + shard.start
        for sample in range(first + offset, first + offset + samples):
            self.model[sample] += 1
        worker.shards[lease] = (shard, offset + samples)
        if offset + samples == len(shard):
            del worker.shards[lease]
        return True

    def leave(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self.queues.answer(LeaveShards(worker.name), self.now)

    def die(self, worker: Worker, *, noticed: bool, really: bool) -> None:
        """Somebody may notice, or its lease runs out. It may also only seem dead."""
        self.workers.remove(worker)
        if noticed:
            self.queues.release(worker.name, "died")
        if not really:
            self.zombies.append(worker)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def save(self) -> None:
        self.saved = json.dumps(self.queues.to_state()), list(self.model)

    def restart(self, *, survivors: bool) -> None:
        """All is lost but the last save. Old workers may still be about, and report into the new term."""
        state, self.model = json.loads(self.saved[0]), list(self.saved[1])
        self.terms += 1
        self.now = 0.0 if self.terms % 2 else self.now
        self.queues = self._queues(self.terms)
        self.queues.restore(state, now=self.now)
        for name in {name for _, name, *_ in state["doing"]} | set(state["workers"]):
            self.queues.release(name, "restarted")
        if survivors:
            self.zombies += self.workers
        self.workers = []
        self._named = 0  # new workers have the names of old ones

    # What must hold.

    def check(self) -> None:
        trained = sum(self.model)
        assert trained == self.queues.epoch * self.layout.samples + self.queues.done
        assert self.queues.todo + self.queues.doing + self.queues.done == self.layout.samples
        assert max(self.model) <= self.queues.epoch + 1

    def finish(self) -> None:
        """Workers do all that is left; then every sample was trained once per epoch."""
        self.join()
        worker = self.workers[-1]
        for _ in range(20 * self.epochs * (self.layout.samples + 1)):
            if worker.epoch == self.epochs:
                break
            self.wait(LEASE / 4)  # others are silent: what they hold comes back
            if not self.work(worker, self.layout.shard_size):
                self.ask(worker)
        assert self.model == [self.epochs] * self.layout.samples
        for zombie in self.zombies:
            for _ in range(3):
                self.work(zombie, 1)
        assert self.model == [self.epochs] * self.layout.samples
