"""Finds a poison micro-batch: one that kills every worker that runs it. Pure, from the deaths of a job's workers.

Deaths are counted by the content of the micro-batch, whichever worker ran it: after a recovery the next worker runs the same
samples. A worker that was lost to a heartbeat timeout, or with its whole node, does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gyrostat.core.evidence import RunningMicroBatch

LIMIT = 3


@dataclass(frozen=True, kw_only=True)
class Death:
    """The death of one worker; the job went on."""

    member: int
    how: str
    running: RunningMicroBatch | None
    """The micro-batch that it was running."""
    alone: bool = True
    """False: its heartbeat timed out, or its whole node was lost."""


def poison(deaths: Sequence[Death], limit: int = LIMIT) -> RunningMicroBatch | None:
    """The micro-batch during which `limit` workers have died; None if there is none, or if the limit is 0."""
    times: Counter[tuple[int, ...]] = Counter()
    for death in deaths:
        if death.running is not None and death.alone:
            times[death.running.content] += 1
            if times[death.running.content] == limit:
                return death.running
    return None
