"""What a loop over data and one step of it consist of. Pure values, equal on all workers."""

from __future__ import annotations

from dataclasses import dataclass

from gyrostat.data.loader import OrderedLoader
from gyrostat.data.order import EpochOrder


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step consists of, for every virtual worker."""

    loader: OrderedLoader
    order: EpochOrder | None
    """None: samplers or an iterable dataset decide the order of samples."""
    first_batch: int
    """The number, within the epoch, of the step's first micro-batch."""
    micro_batches: int
    """Micro-batches per virtual worker (`accumulate`)."""

    def weight(self, rank: int) -> float | None:
        """The share of virtual worker `rank` in this step; None if all shares are equal."""
        return None if self.order is None else self.order.weight(rank, self.first_batch)

    def samples(self, rank: int, number: int) -> list[int] | None:
        """The indices of a micro-batch's samples; None if the job does not order them."""
        return None if self.order is None else self.order.indices(rank, self.first_batch + number)

    def content(self, rank: int, number: int) -> list[int]:
        """What identifies a micro-batch: its sample indices or, if the job does not order them, its position."""
        samples = self.samples(rank, number)
        return [rank, self.first_batch + number] if samples is None else samples


@dataclass(frozen=True, kw_only=True)
class DataLoop:
    """One loop over a loader's micro-batches, from the beginning or from the batch at which it resumes."""

    loader: OrderedLoader
    order: EpochOrder | None
    epoch: int
    accumulate: int
    first_batch: int
    batches: int | None = None
    """Micro-batches of each virtual worker in the whole loop; None if that is not known beforehand."""

    def is_same_as(self, other: DataLoop) -> bool:
        """The same micro-batches in the same order."""
        mine, theirs = (
            (loop.loader.number, loop.epoch, loop.accumulate, loop.first_batch) for loop in (self, other)
        )
        return mine == theirs


@dataclass
class MicroBatch:
    """The micro-batch that is running now."""

    rank: int
    number: int
    last: bool
    backward_done: bool = False
