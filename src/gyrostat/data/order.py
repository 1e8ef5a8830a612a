"""Sample order: a pure function of (seed, epoch, virtual rank, batch number, dataset length, options).

`Order` gives exactly the indices of `torch.utils.data.DistributedSampler` over N ranks, one micro-batch at a time.
`UnevenOrder` is for virtual workers with batch sizes of their own: every sample exactly once, nothing padded. Neither
the number of workers nor the placement appears anywhere. `loader.py` next door turns indices into micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from gyrostat.core.errors import Misuse
from gyrostat.core.placement import apportion


@dataclass(frozen=True, kw_only=True)
class EpochOrder(ABC):
    """The order of one epoch, for all virtual workers."""

    length: int
    """Samples in the dataset."""
    seed: int
    epoch: int
    shuffle: bool

    @property
    @abstractmethod
    def batches(self) -> int:
        """How many micro-batches every virtual worker sees."""

    @abstractmethod
    def positions(self, rank: int, batch: int) -> range:
        """Where in the shuffled sequence the samples of a micro-batch lie."""

    @abstractmethod
    def samples(self, batch: int) -> int:
        """How many samples all virtual workers together see in their micro-batches number `batch`."""

    @abstractmethod
    def weight(self, rank: int, batch: int) -> float | None:
        """The share of virtual worker `rank` in micro-batch `batch`; None if all shares are equal."""

    def indices(self, rank: int, batch: int) -> list[int]:
        """The dataset indices of one micro-batch of virtual worker `rank`."""
        positions = self.positions(rank, batch)
        if self.shuffle and positions.stop <= self.length:
            return self._permutation[positions.start : positions.stop : positions.step].tolist()
        # Position j of the padded sequence is position j mod length of the permutation: padding repeats it.
        wrapped = [position % self.length for position in positions]
        return self._permutation[wrapped].tolist() if self.shuffle else wrapped

    @cached_property
    def _permutation(self) -> torch.Tensor:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Order(EpochOrder):
    """DistributedSampler's order: equal micro-batches, by padding or cutting."""

    virtual_workers: int
    batch_size: int
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
        if self.drop_last:
            return self.samples_each // self.batch_size
        return -(-self.samples_each // self.batch_size)

    def positions(self, rank: int, batch: int) -> range:
        first = batch * self.batch_size
        last = min(first + self.batch_size, self.samples_each)
        n = self.virtual_workers
        return range(rank + first * n, rank + last * n, n)

    def samples(self, batch: int) -> int:
        first = batch * self.batch_size
        return (min(first + self.batch_size, self.samples_each) - first) * self.virtual_workers

    def weight(self, rank: int, batch: int) -> float | None:
        return None


@dataclass(frozen=True, kw_only=True)
class UnevenOrder(EpochOrder):
    """Virtual worker r sees `sizes[r]` samples per step, and every sample is seen exactly once.

    The last step has what is left, shared out in proportion. If that is not one sample for each virtual worker, the last two
    steps share evenly what the two of them have.
    """

    sizes: tuple[int, ...]
    drop_last: bool = False
    """Leave out a last step that is not full."""

    @cached_property
    def _steps(self) -> tuple[tuple[int, int], ...]:
        """For every step where its samples begin and end."""
        whole, n = sum(self.sizes), len(self.sizes)
        cuts = list(range(0, self.length + 1, whole))
        left = self.length - cuts[-1]
        if left and not self.drop_last:
            if left < n and len(cuts) > 1 and (whole + left) // 2 >= n:
                cuts[-1] = cuts[-2] + -(-(whole + left) // 2)
            elif left < n:
                raise Misuse(
                    f"{self.length} samples in steps of {whole} leave {left} for {n} virtual workers; use drop_last=True, or "
                    "other batch sizes"
                )
            cuts.append(self.length)
        return tuple(pairwise(cuts))

    @property
    def batches(self) -> int:
        return len(self._steps)

    def _shares(self, batch: int) -> list[int]:
        """How many samples each virtual worker sees in this step."""
        samples = self.samples(batch)
        if samples == sum(self.sizes):
            return list(self.sizes)
        return apportion(
            samples, [size - 1 for size in self.sizes]
        )  # one each, and nobody more than its size

    def positions(self, rank: int, batch: int) -> range:
        shares = self._shares(batch)
        first = self._steps[batch][0] + sum(shares[:rank])
        return range(first, first + shares[rank])

    def samples(self, batch: int) -> int:
        start, stop = self._steps[batch]
        return stop - start

    def weight(self, rank: int, batch: int) -> float | None:
        shares = self._shares(batch)
        return None if len(set(shares)) == 1 else shares[rank] / sum(shares)
