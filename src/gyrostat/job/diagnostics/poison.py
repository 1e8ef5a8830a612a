"""Is there a micro-batch that kills whoever runs it? Decided purely, from the deaths that a job has had.

What counts is the content of the micro-batch, wherever and in whichever process it was run: a worker that dies of a sample
takes the next one with it, and the one after that. A worker that fell silent, or was lost with its whole node, has died of
something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gyrostat.core.evidence import RunningMicroBatch

LIMIT = 3


@dataclass(frozen=True, kw_only=True)
class Death:
    """A worker that was killed while the job went on."""

    member: int
    how: str
    running: RunningMicroBatch | None
    """What it was running then."""
    alone: bool = True
    """False: it fell silent, or its whole node was lost."""


def poison(deaths: Sequence[Death], limit: int = LIMIT) -> RunningMicroBatch | None:
    """The micro-batch during which `limit` workers have died; None if there is none, or with a limit of 0."""
    times: Counter[tuple[int, ...]] = Counter()
    for death in deaths:
        if death.running is not None and death.alone:
            times[death.running.content] += 1
            if times[death.running.content] == limit:
                return death.running
    return None
