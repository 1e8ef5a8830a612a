"""A serving load that shares the cluster: it takes devices by day and returns them by night.

A stream of `Withdrawn` for `SimCluster(changes=…)`: the number of devices of a type that serving needs, every `step` seconds,
a sine between `trough` and `peak` plus noise. The same seed gives the same stream.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from gyrostat.core.errors import UsageError
from gyrostat.sched.port import Change, Withdrawn


@dataclass(frozen=True, kw_only=True)
class Diurnal:
    """Devices that serving needs over a day."""

    type: str
    trough: int
    peak: int
    period: float = 86_400.0
    step: float = 300.0
    """Seconds between changes."""
    noise: float = 0.0
    """Standard deviation, as a share of the difference between peak and trough."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.trough <= self.peak:
            raise UsageError(f"a serving load goes from trough up to peak, got {self.trough} and {self.peak}")
        if self.step <= 0 or self.period <= 0:
            raise UsageError(f"period and step are seconds above 0, got {self.period} and {self.step}")

    def changes(self) -> Iterator[tuple[float, Change]]:
        """Endless; time 0 is midnight, the trough."""
        draw = random.Random(self.seed)
        number = 0
        while True:
            now = number * self.step
            yield now, Withdrawn(self.type, self._needed(now, draw.gauss(0.0, 1.0)))
            number += 1

    def _needed(self, now: float, wobble: float) -> int:
        height = (1 - math.cos(2 * math.pi * now / self.period)) / 2 + self.noise * wobble
        span = self.peak - self.trough
        return self.trough + round(span * min(max(height, 0.0), 1.0))
