"""How fast a job runs on each number of workers, measured while it trains (EDL §5.2): decided purely.

It begins with the most workers and goes down one by one, for leaving costs less than joining. On every size some steps
pass until things have settled, and then some are measured. In the end the job goes back to the size that it had.
`coordinator` carries the changes out, as any others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from gyrostat.job.processes.protocol import StepReport

SETTLING = 2
"""Steps that are not measured: the first after a change waits for newcomers' first, and caches are cold."""


@dataclass(frozen=True, kw_only=True)
class SizeMeasured:
    """One line of a job's profile."""

    workers: int
    steps: int
    """So many were measured."""
    step_seconds: float
    """The median."""
    throughput: float
    """Samples per second."""
    busy: float
    """For which share of the time a worker ran its virtual workers, on average; otherwise it waited or exchanged."""
    efficiency: float = 1.0
    """Throughput per worker, relative to the size of this profile where that is best."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Somebody wants to know."""

    smallest: int | None = None
    """With `largest`: measure all sizes between them; without: the size that the job has."""
    largest: int | None = None
    steps: int = 20
    request: str | None = None

    def ends(self, workers: int) -> tuple[int, int]:
        """The fewest and the most workers, for a job that has so many."""
        smallest = workers if self.smallest is None else self.smallest
        return smallest, workers if self.largest is None else self.largest


@dataclass
class Profiling:
    """A profile under way."""

    wish: ProfileRequest
    home: int
    """The size to which the job goes back."""
    sizes: list[int]
    """Still to be measured, in this order; the first one is under way."""
    rows: list[SizeMeasured] = field(default_factory=list)
    _first: int = 0
    _seen: dict[int, StepReport] = field(default_factory=dict)

    @classmethod
    def of(cls, wish: ProfileRequest, workers: int) -> Profiling:
        """For a job that runs on so many workers now."""
        smallest, largest = wish.ends(workers)
        return cls(wish, workers, list(range(largest, smallest - 1, -1)))

    @property
    def wants(self) -> int:
        """On how many workers the job should run now."""
        return self.sizes[0] if self.sizes else self.home

    def begin(self, step: int) -> None:
        """The job runs on the wanted size since boundary `step`."""
        self._first = step + SETTLING
        self._seen = {}

    def add(self, steps: Sequence[StepReport]) -> bool:
        """Some steps are complete. True: this size is measured, and the next one is wanted."""
        last = self._first + self.wish.steps
        self._seen |= {step.step: step for step in steps if self._first <= step.step <= last}
        if len(self._seen) <= self.wish.steps:
            return False
        self.rows.append(measured(self.sizes.pop(0), [self._seen[step] for step in sorted(self._seen)]))
        return True

    def table(self) -> tuple[SizeMeasured, ...]:
        """What was found, from the fewest workers to the most."""
        best = max(row.throughput / row.workers for row in self.rows)
        rows = sorted(self.rows, key=lambda row: row.workers)
        return tuple(replace(row, efficiency=row.throughput / row.workers / best) for row in rows)


def measured(workers: int, steps: Sequence[StepReport]) -> SizeMeasured:
    """What consecutive steps say; the first is there for the time at which it was complete. Medians, so that an evaluation or
    a checkpoint between two of them does not count.
    """
    seconds = statistics.median(later.at - earlier.at for earlier, later in pairwise(steps))
    seconds = max(seconds, 1e-9)
    busy = [statistics.fmean(step.busy) for step in steps[1:] if step.busy]
    return SizeMeasured(
        workers=workers,
        steps=len(steps) - 1,
        step_seconds=seconds,
        throughput=statistics.fmean(step.samples for step in steps[1:]) / seconds,
        busy=min(1.0, statistics.median(busy) / seconds) if busy else 0.0,
    )
