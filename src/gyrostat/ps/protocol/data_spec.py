"""`DataSpec`: the training data of a job, as its shard queues need to know it."""

from __future__ import annotations

import msgspec

from gyrostat.data.shards.layout import ShardLayout
from gyrostat.data.shards.queues import Queues


class DataSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shard queues of a job's training data. The same on all workers."""

    samples: int
    batch_size: int
    shard_size: int
    seed: int = 0
    shuffle: bool = True

    def queues(self, lease_seconds: float) -> Queues:
        """Queues of the whole data."""
        return Queues(
            ShardLayout.of_indices(self.samples, self.shard_size),
            seed=self.seed,
            shuffle=self.shuffle,
            grain=self.batch_size,
            lease_seconds=lease_seconds,
        )
