"""Sample order: a pure function of (seed, epoch, virtual rank, batch number, dataset length, options).

`EvenOrder` gives exactly the indices of `torch.utils.data.DistributedSampler` over N ranks, one micro-batch at a time.
`UnevenOrder` is for virtual workers with batch sizes of their own: every sample exactly once, nothing padded. Either can
use a computed order (`bijection.py`) instead of a stored permutation. Neither depends on the number of workers or on the
placement. `loader.py` makes micro-batches of the indices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from gyrostat.core.errors import Misuse
from gyrostat.core.placement import apportion
from gyrostat.data.bijection import Bijection

Shuffle = bool | Literal["bijection"]
"""True: DistributedSampler's permutation, 8 bytes per sample. "bijection": computed, for datasets too large for that."""


@dataclass(frozen=True, kw_only=True)
class EpochOrder(ABC):
    """The order of one epoch, for all virtual workers."""

    length: int
    """Samples in the dataset."""
    seed: int
    epoch: int
    shuffle: Shuffle

    @property
    @abstractmethod
    def batches(self) -> int:
        """The number of micro-batches of every virtual worker."""

    @abstractmethod
    def positions(self, rank: int, batch: int) -> range:
        """The positions of a micro-batch's samples in the shuffled sequence."""

    @abstractmethod
    def samples(self, batch: int) -> int:
        """The number of samples in the micro-batches number `batch` of all virtual workers."""

    @abstractmethod
    def weight(self, rank: int, batch: int) -> float | None:
        """The share of virtual worker `rank` in micro-batch `batch`; None if all shares are equal."""

    def indices(self, rank: int, batch: int) -> list[int]:
        """The dataset indices of one micro-batch of virtual worker `rank`."""
        positions = self.positions(rank, batch)
        if self.shuffle and positions.stop <= self.length:
            if self.shuffle == "bijection":
                return self._bijection.take(positions)
            found: list[int] = self._permutation[positions.start : positions.stop : positions.step].tolist()
            return found
        # Position j of the padded sequence is position j mod length of the permutation: padding repeats it.
        wrapped = [position % self.length for position in positions]
        if self.shuffle == "bijection":
            return [self._bijection[position] for position in wrapped]
        return self._permutation[wrapped].tolist() if self.shuffle else wrapped

    @cached_property
    def _bijection(self) -> Bijection:
        return Bijection(self.length, self.seed, self.epoch)

    @cached_property
    def _permutation(self) -> npt.NDArray[np.int64]:
        """torch's permutation as a NumPy array, from which a few elements are taken in a quarter of the time."""
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator).numpy()


@dataclass(frozen=True, kw_only=True)
class EvenOrder(EpochOrder):
    """DistributedSampler's order: equal micro-batches, by padding or cutting."""

    virtual_workers: int
    batch_size: int
    drop_last: bool = False
    """Leave out a virtual worker's last micro-batch if it is not full (DataLoader's `drop_last`)."""
    pad: bool = True
    """Repeat samples until all virtual workers have equally many; otherwise cut (DistributedSampler's `drop_last`)."""

    @cached_property
    def samples_each(self) -> int:
        """The number of samples of every virtual worker."""
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

    The last step has the remaining samples, divided in proportion. If they are fewer than the virtual workers, the last two
    steps divide their samples evenly.
    """

    sizes: tuple[int, ...]
    drop_last: bool = False
    """Leave out a last step that is not full."""

    @cached_property
    def _full(self) -> int:
        """The number of steps that are full."""
        return self.length // sum(self.sizes) - (self._lent > 0)

    @cached_property
    def _left(self) -> int:
        """Samples that remain after the full steps."""
        return 0 if self.drop_last else self.length % sum(self.sizes)

    @cached_property
    def _lent(self) -> int:
        """Samples that the last step takes from the step before, so that it has one for each virtual worker."""
        whole, n, left = sum(self.sizes), len(self.sizes), self._left
        if not 0 < left < n:
            return 0
        if self.length > whole and (whole + left) // 2 >= n:
            return (whole + left) // 2 - left
        raise Misuse(
            f"{self.length} samples in steps of {whole} leave {left} for {n} virtual workers; use drop_last=True, or "
            "other batch sizes"
        )

    @property
    def batches(self) -> int:
        return self._full + (self._lent > 0) + (self._left > 0)

    def _span(self, batch: int) -> tuple[int, int]:
        """The first position of a step, and the position after its last."""
        whole, full = sum(self.sizes), self._full
        if batch < full:
            return batch * whole, (batch + 1) * whole
        start = full * whole
        if not self._lent:
            return start, start + self._left
        cut = start + whole - self._lent
        return (start, cut) if batch == full else (cut, cut + self._left + self._lent)

    @property
    def even(self) -> bool:
        """Whether all virtual workers have equally many samples in every step."""
        return len(set(self.sizes)) == 1 and self._left % len(self.sizes) == 0

    def shares(self, batch: int) -> list[int]:
        """The number of samples of each virtual worker in this step."""
        samples = self.samples(batch)
        if samples == sum(self.sizes):
            return list(self.sizes)
        return apportion(samples, [size - 1 for size in self.sizes])  # one each, and none more than its size

    def positions(self, rank: int, batch: int) -> range:
        shares = self.shares(batch)
        first = self._span(batch)[0] + sum(shares[:rank])
        return range(first, first + shares[rank])

    def samples(self, batch: int) -> int:
        start, stop = self._span(batch)
        return stop - start

    def weight(self, rank: int, batch: int) -> float | None:
        shares = self.shares(batch)
        return None if len(set(shares)) == 1 else shares[rank] / sum(shares)
