"""Evaluates the measurements of both levels: the slowdown under `heterogeneous`, its origin, and whether to mix types. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gyrostat.core.job import DeviceMix, DevicePool
from gyrostat.job.scan.measured import Measured


@dataclass(frozen=True, kw_only=True)
class ScanRow:
    """An operator or a module under both levels, per step."""

    name: str
    elastic_ms: float
    heterogeneous_ms: float
    share: float
    """The fraction of a step under `elastic`."""
    added: float
    """The time that pins add, as a fraction of a step under `elastic`."""

    @property
    def ratio(self) -> float | None:
        return self.heterogeneous_ms / self.elastic_ms if self.elastic_ms > 0 else None


@dataclass(frozen=True, kw_only=True)
class ScanVerdict:
    """The result of a scan."""

    pool: tuple[str, ...]
    cpu_type: str | None
    """The type of the CPU that ran the scan."""
    slowdown: float
    """A step's time under `heterogeneous` over that under `elastic`: the median over pairs of turns."""
    low: float
    high: float
    """Its 95 % interval."""
    threshold: float
    elastic_ms: float
    heterogeneous_ms: float
    operators: tuple[ScanRow, ...]
    modules: tuple[ScanRow, ...]
    """Both ordered by the time that pins add, largest first."""

    @property
    def mix(self) -> DeviceMix:
        return DeviceMix(pool=self.pool, slowdown=self.slowdown, mixes_types=self.slowdown <= self.threshold)

    @property
    def reason(self) -> str:
        summary = f"pins for {', '.join(self.pool)} make a step {self.slowdown:.2f}× as long here"
        if self.slowdown <= self.threshold:
            return f"yes: {summary}, at most {self.threshold:g}×"
        slow = [row.name for row in self.operators[:3] if row.added > 0.01]
        where = f", most of it in {', '.join(slow)}" if slow else ""
        return f"no: {summary}, more than {self.threshold:g}×{where}"


def decide(
    elastic: Measured, heterogeneous: Measured, *, pool: DevicePool, cpu_type: str | None, threshold: float
) -> ScanVerdict:
    """From measurements that were taken in turns."""
    ratios = [mine / other for mine, other in zip(heterogeneous.turns, elastic.turns, strict=False)]
    low, high = interval(ratios)
    step = statistics.median(elastic.turns)
    return ScanVerdict(
        pool=pool.types,
        cpu_type=cpu_type,
        slowdown=statistics.median(ratios),
        low=low,
        high=high,
        threshold=threshold,
        elastic_ms=1000 * step,
        heterogeneous_ms=1000 * statistics.median(heterogeneous.turns),
        operators=_rows(elastic.operators, heterogeneous.operators, step),
        modules=_rows(elastic.modules, heterogeneous.modules, step),
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A confidence interval of the median, at least 95 %, for any distribution."""
    ordered, cut = sorted(values), 0
    while 2 * sum(math.comb(len(ordered), k) for k in range(cut + 2)) <= 0.05 * 2 ** len(ordered):
        cut += 1
    return ordered[cut], ordered[-1 - cut]


def _rows(
    elastic: Mapping[str, float], heterogeneous: Mapping[str, float], step: float
) -> tuple[ScanRow, ...]:
    rows = []
    for name in elastic.keys() | heterogeneous.keys():
        d1, d2 = elastic.get(name, 0.0), heterogeneous.get(name, 0.0)
        rows.append(
            ScanRow(
                name=name,
                elastic_ms=1000 * d1,
                heterogeneous_ms=1000 * d2,
                share=d1 / step,
                added=(d2 - d1) / step,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.added, row.name)))
