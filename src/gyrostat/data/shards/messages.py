"""Requests of workers and their replies. Plain frozen values, so that they can be sent.

    AskShard     → Shard, WaitForShard or EpochOver
    ShardReport  → ReportVerdict
    LeaveShards  → None

A worker reports samples together with the update that they went into: either both are accepted, or neither is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AskShard:
    """A worker needs a shard of this epoch."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Samples `start` … `stop`-1 belong to the worker, until it reports them or its lease expires."""

    lease: int
    """Identifies this assignment; unique within a term."""
    term: int
    """The term of the queues. Queues restored after a failure have a new term, and refuse reports about earlier ones."""
    epoch: int
    source: str | None
    """The file; None for indices into a dataset."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class WaitForShard:
    """No shard is available now, but one may be returned: other workers hold the last ones of the epoch."""

    reason: str


@dataclass(frozen=True, slots=True)
class EpochOver:
    """Every sample of the epoch has been reported."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A worker's progress in each shard it holds: the samples that went into its updates, counted from the shard's start.

    Shards that it has not begun are listed with 0: a report renews the leases that it lists.
    """

    worker: str
    term: int
    offsets: tuple[tuple[int, int], ...]
    """(lease, samples)"""


@dataclass(frozen=True, slots=True)
class ReportVerdict:
    """Whether a report is accepted, as a whole. If not, the update that belongs to it must be dropped too."""

    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LeaveShards:
    """A worker leaves. Samples that it has not reported are returned."""

    worker: str


@dataclass(frozen=True, slots=True)
class ReturnedShards:
    """Samples that were returned to TODO, and why; for the log."""

    worker: str
    lease: int
    samples: int
    reason: str


Request = AskShard | ShardReport | LeaveShards
Answer = Shard | WaitForShard | EpochOver | ReportVerdict | None
