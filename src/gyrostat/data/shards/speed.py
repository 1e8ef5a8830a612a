"""Measures the speed of workers from their reports, and decides how much of a shard a worker gets. Not kept over a restart.

Fast workers get more because they ask more often. But a straggler could take a whole shard near the end of an epoch, and all
others would wait for it. So it gets a smaller part of one: its speed relative to the median. And when less than a shard for
each worker is left, the rest is divided evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

STRAGGLER = 1.2
"""A worker is a straggler if the median is this many times as fast, as in EDL (§5.2)."""
_SMOOTHING = 0.3


@dataclass
class _Measured:
    since: float
    samples: int = 0
    """Reported since then."""
    rate: float | None = None
    waiting: bool = False
    """It has no shard: this time does not count."""


class Speeds:
    """Samples per second of every worker, smoothed."""

    def __init__(self) -> None:
        self._workers: dict[str, _Measured] = {}
        self._median: float | None = None
        self._reports_until_median = 0

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def workers(self) -> list[str]:
        return list(self._workers)

    def join(self, worker: str, now: float) -> None:
        if worker not in self._workers:
            self._workers[worker] = _Measured(now)

    def wait(self, worker: str) -> None:
        self._workers[worker].waiting = True

    def begin(self, worker: str, now: float) -> None:
        """A worker gets a shard."""
        measured = self._workers[worker]
        if measured.waiting:
            measured.waiting, measured.since, measured.samples = False, now, 0

    def leave(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def report(self, worker: str, samples: int, now: float) -> None:
        measured = self._workers[worker]
        measured.samples += samples
        seconds = now - measured.since
        if seconds > 0 and measured.samples > 0:
            rate = measured.samples / seconds
            old = rate if measured.rate is None else measured.rate
            measured.rate = old + _SMOOTHING * (rate - old)
            measured.since, measured.samples = now, 0
            self._reports_until_median -= 1

    def rate(self, worker: str) -> float | None:
        measured = self._workers.get(worker)
        return None if measured is None else measured.rate

    def share(self, worker: str) -> float:
        """1, or for a straggler its speed divided by the median."""
        rate = self._workers[worker].rate
        if rate is None:
            return 1.0
        # Of W workers' rates, the median hardly moves before W more reports: no need to sort at every request.
        if self._reports_until_median <= 0:
            self._median = median(m.rate for m in self._workers.values() if m.rate is not None)
            self._reports_until_median = len(self._workers)
        assert self._median is not None
        return 1.0 if rate * STRAGGLER >= self._median else rate / self._median


def portion(*, available: int, todo: int, workers: int, share: float, grain: int) -> int:
    """How many of the `available` samples of a shard a worker gets; a multiple of `grain`, or all of them.

    `todo`: samples that no worker holds, these included. `workers`: the number of workers.
    """
    wanted = min(available * share, todo / workers)
    pieces = max(1, -(-wanted // grain))
    return min(available, int(pieces) * grain)
