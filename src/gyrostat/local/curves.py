"""Loss and throughput of a job over time: one line per second in which it trains.

    {"at": 1763269211.2, "step": 120, "epoch": 3, "loss": 0.41, "throughput": 830.5}

`loss` is virtual worker 0's mean over the steps of that second, `throughput` samples of all virtual workers per second. The
devices it had are in the cluster's events.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gyrostat.job.processes.protocol import StepReport

EVERY_S = 1.0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    at: float
    """Seconds since the epoch."""
    step: int
    """Number of complete steps."""
    epoch: int
    loss: float | None
    throughput: float | None
    """Unknown for the first step: its start was not seen."""


class Curves:
    """Pure: steps in, points out."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._steps: list[StepReport] = []

    def add(self, steps: Iterable[StepReport], now: float, monotonic: float) -> list[Point]:
        """`now` is the time by the epoch, `monotonic` by the clock that steps are stamped with."""
        points = []
        for step in steps:
            self._steps.append(step)
            if self._since is None or step.at - self._since >= EVERY_S:
                points.append(self._point(now - monotonic))
        return points

    def rest(self, now: float, monotonic: float) -> list[Point]:
        """The last points, when training is over."""
        return [self._point(now - monotonic)] if self._steps else []

    def _point(self, offset: float) -> Point:
        last = self._steps[-1]
        losses = [step.loss for step in self._steps if step.loss is not None]
        elapsed = 0.0 if self._since is None else last.at - self._since
        point = Point(
            at=last.at + offset,
            step=last.step,
            epoch=last.epoch,
            loss=sum(losses) / len(losses) if losses else None,
            throughput=sum(step.samples for step in self._steps) / elapsed if elapsed > 0 else None,
        )
        self._since, self._steps = last.at, []
        return point
