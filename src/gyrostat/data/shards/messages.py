"""What a worker asks, and what it is answered. Plain frozen values, so that they can travel.

    Ask     → Shard, Wait or EpochOver
    Report  → Verdict
    Leave   → nothing

A worker reports together with the update that its samples went into: the report and the update hold, or neither does.
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
    """Samples `start` … `stop`-1 are the worker's, until it reports them or falls silent for longer than the lease."""

    lease: int
    """Names this handing-out; no other has the same number within a term."""
    term: int
    """Whose queues it came from. Those restored after a failure have another term, and refuse reports about this one."""
    epoch: int
    source: str | None
    """The file; None for indices into a dataset."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class WaitForShard:
    """Nothing to do now, but some may come back: the last shards of the epoch are with other workers."""

    reason: str


@dataclass(frozen=True, slots=True)
class EpochOver:
    """Every sample of the epoch has been reported."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ShardReport:
    """How far a worker is in each shard it holds: the samples that went into its updates, counted from the shard's start.

    Shards that it holds but has not begun are listed with 0: being listed is what keeps a lease alive.
    """

    worker: str
    term: int
    offsets: tuple[tuple[int, int], ...]
    """(lease, samples)"""


@dataclass(frozen=True, slots=True)
class ReportVerdict:
    """Whether a report holds, as a whole. If not, nothing of it counts, and the update that came with it must not either."""

    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LeaveShards:
    """A worker goes. What it has not reported goes back."""

    worker: str


@dataclass(frozen=True, slots=True)
class ReturnedShards:
    """What went back to TODO, and why: for the log."""

    worker: str
    lease: int
    samples: int
    reason: str


Request = AskShard | ShardReport | LeaveShards
Answer = Shard | WaitForShard | EpochOver | ReportVerdict | None
