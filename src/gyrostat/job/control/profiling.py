"""The profile of a job: its throughput on each number of workers, measured while it trains (EDL §5.2). Decided purely.

It begins with the largest size and removes workers one by one, because leaving costs less than joining. On every size some
steps are skipped until speed has settled, and then some are measured. At the end the job returns to its original size.
`coordinator` makes the changes, like any others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from gyrostat.core.plural import plural
from gyrostat.job.processes.protocol import StepReport

SETTLING = 2
"""Steps that are skipped after a change: caches are cold."""
WINDOW = 20
"""Steps of a measurement outside of profiles."""


@dataclass(frozen=True, kw_only=True)
class SizeMeasured:
    """One line of a job's profile."""

    workers: int
    steps: int
    """Measured steps."""
    step_seconds: float
    """The median."""
    throughput: float
    """Samples per second."""
    busy: float
    """The share of the time in which a worker ran its virtual workers, on average; the rest is waiting and communication."""
    efficiency: float | None = None
    """Throughput per worker, relative to the size at which that was highest while the job ran: t(p)/p over t(p*)/p* (EDL §3.1).
    None: it has run on one size only.
    """


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """A requested profile."""

    smallest: int | None = None
    """With `largest`: measure all sizes between them. The default is the current size."""
    largest: int | None = None
    steps: int = 20
    request: str | None = None

    def ends(self, workers: int) -> tuple[int, int]:
        """The smallest and the largest size, for a job that runs on `workers` workers."""
        smallest = workers if self.smallest is None else self.smallest
        return smallest, workers if self.largest is None else self.largest

    def impossible(self, workers: int, virtual_workers: int, devices: int | None = None) -> str | None:
        """Why a job that runs on `workers` workers, and has this number of devices if a scheduler assigns them, cannot be
        profiled so; None: it can."""
        smallest, largest = self.ends(workers)
        if devices is not None and largest > devices:
            return f"the job has {plural(devices, 'device')} and cannot be measured on {largest}"
        if not 1 <= smallest <= largest <= virtual_workers:
            return (
                f"there is no size from {smallest} to {largest} to measure; sizes are 1 to {virtual_workers}, the number of "
                "virtual workers"
            )
        return f"a size is measured over at least one step, not over {self.steps}" if self.steps < 1 else None


@dataclass
class Profiling:
    """A profile under way."""

    request: ProfileRequest
    original_size: int
    """The size to which the job returns."""
    sizes: list[int]
    """Sizes still to be measured, in this order; the first one is under way."""
    rows: list[SizeMeasured] = field(default_factory=list)
    _first: int = 0
    _seen: dict[int, StepReport] = field(default_factory=dict)

    @classmethod
    def of(cls, request: ProfileRequest, workers: int) -> Profiling:
        """For a job that runs on `workers` workers now."""
        smallest, largest = request.ends(workers)
        return cls(request, workers, list(range(largest, smallest - 1, -1)))

    @property
    def target(self) -> int:
        """The number of workers on which the job should run now."""
        return self.sizes[0] if self.sizes else self.original_size

    def begin(self, step: int) -> None:
        """The job runs on the target size since boundary `step`."""
        self._first = step + SETTLING
        self._seen = {}

    def add(self, steps: Sequence[StepReport]) -> bool:
        """Steps are complete. True: this size is measured, the next one is to follow."""
        last = self._first + self.request.steps
        self._seen |= {step.step: step for step in steps if self._first <= step.step <= last}
        if len(self._seen) <= self.request.steps:
            return False
        self.rows.append(measured(self.sizes.pop(0), [self._seen[step] for step in sorted(self._seen)]))
        return True

    def table(self, speeds: SpeedBySize) -> tuple[SizeMeasured, ...]:
        """The profile, from the smallest size to the largest. `speeds`: what was measured before; this is added."""
        for row in self.rows:
            speeds.add(row)
        rows = sorted(self.rows, key=lambda row: row.workers)
        return tuple(replace(row, efficiency=speeds.efficiency(row)) for row in rows)


class SpeedBySize:
    """The throughput per worker on every size on which the job has run: of profiles, and of its steps in between."""

    def __init__(self) -> None:
        self._best: dict[int, float] = {}
        self._size = 0
        self._steps: list[StepReport] = []

    def stepped(self, workers: int, steps: Sequence[StepReport]) -> None:
        """Steps are complete, on this number of workers and no change under way."""
        if workers != self._size:
            self._size, self._steps = workers, []
        self._steps += steps
        if len(self._steps) > SETTLING + WINDOW:
            self.add(measured(workers, self._steps[SETTLING:]))
            self._steps = []

    def add(self, row: SizeMeasured) -> None:
        self._best[row.workers] = max(self._best.get(row.workers, 0.0), row.throughput / row.workers)

    def efficiency(self, row: SizeMeasured) -> float | None:
        if len(self._best) < 2:
            return None
        return row.throughput / row.workers / max(self._best.values())


def measured(workers: int, steps: Sequence[StepReport]) -> SizeMeasured:
    """The measurement of one size, from consecutive steps; of the first one only the time of completion counts. Medians, so
    that an evaluation or a checkpoint between two steps does not count."""
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
