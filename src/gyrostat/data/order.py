"""Sample order: a pure function of (seed, epoch, virtual rank, batch number, dataset length, options).

It gives exactly the indices of `torch.utils.data.DistributedSampler` over N ranks, one micro-batch at a time. Neither
the number of workers nor the placement appears anywhere. `loader.py` next door turns indices into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of one epoch."""

    length: int
    """Samples in the dataset."""
    virtual_workers: int
    batch_size: int
    seed: int
    epoch: int
    shuffle: bool
    drop_last: bool = False
    """Leave out a virtual worker's last micro-batch if it is not full (DataLoader's `drop_last`)."""
    pad: bool = True
    """Repeat samples until all virtual workers have equally many; otherwise cut (DistributedSampler's `drop_last`)."""

    @cached_property
    def samples_each(self) -> int:
        """How many samples every virtual worker sees."""
        n = self.virtual_workers
        return -(-self.length // n) if self.pad else self.length // n

    @cached_property
    def batches(self) -> int:
        """How many micro-batches every virtual worker sees."""
        if self.drop_last:
            return self.samples_each // self.batch_size
        return -(-self.samples_each // self.batch_size)

    @cached_property
    def _permutation(self) -> torch.Tensor:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator)

    def indices(self, rank: int, batch: int) -> list[int]:
        """The dataset indices of one micro-batch of virtual worker `rank`."""
        first = batch * self.batch_size
        last = min(first + self.batch_size, self.samples_each)
        n = self.virtual_workers
        # Position j of the padded sequence is position j mod length of the permutation: padding repeats it from the start.
        positions = range(rank + first * n, rank + last * n, n)
        if not self.shuffle:
            return [position % self.length for position in positions]
        wanted = torch.tensor(positions, dtype=torch.int64).remainder_(self.length)
        return self._permutation[wanted].tolist()
