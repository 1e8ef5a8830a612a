"""Finds a poison shard: one that kills every worker that trains it. Pure, from the deaths of a job's workers.

A shard is never dropped. Deaths are counted by the micro-batch that the worker was running, if its black box says so, otherwise
by the shard that it held: a worker may also die while it reads or sends parameters. A worker that was lost to a heartbeat
timeout or killed by the job itself does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gyrostat.core.evidence import RunningMicroBatch


@dataclass(frozen=True)
class ShardInHand:
    """Samples `start` … `stop`-1 of an epoch."""

    epoch: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"shard of samples {self.start} to {self.stop - 1} of epoch {self.epoch}"


@dataclass(frozen=True, kw_only=True)
class ShardDeath:
    """The death of one worker of a job with parameter servers."""

    member: int
    shard: ShardInHand | None
    """What it held."""
    running: RunningMicroBatch | None = None
    """The micro-batch that it was running."""

    @property
    def cause(self) -> tuple[int, ...] | None:
        """Equal for the same work on any worker; None: it held nothing."""
        if self.running is not None and self.running.samples is not None:
            return self.running.content
        return None if self.shard is None else (-1, self.shard.epoch, self.shard.start, self.shard.stop)

    def __str__(self) -> str:
        """What it was doing."""
        parts = [str(each) for each in (self.running, self.shard) if each is not None]
        return ", of the ".join(parts) or "no shard"


def poison_shard(deaths: Sequence[ShardDeath], limit: int) -> ShardDeath | None:
    """The last of `limit` deaths of the same cause; None if there is none, or if the limit is 0."""
    times: Counter[tuple[int, ...]] = Counter()
    for death in deaths:
        if (cause := death.cause) is not None:
            times[cause] += 1
            if times[cause] == limit:
                return death
    return None
