"""A first profile for a job that has never run, from what other jobs measured (EasyScale's companion is seeded like this).

Known for the workload and the type: the median of what was measured. Known for the workload, but not on this type: its
speed elsewhere, times how much faster or slower the type was for the workloads that ran on both. Nothing known about the
workload: only ratios between types matter for a first decision, so the median ratios stand in for it, relative to the
slowest type. The first measurement corrects all of it (`companion.Companion.measured`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile, Speed


@dataclass(frozen=True)
class Observation:
    """One job's micro-batches of `batch` samples on one device of `type`."""

    workload: str
    type: str
    batch: int
    samples_per_second: float


def seed_profile(
    history: Iterable[Observation], *, workload: str, batch: int, types: Sequence[str]
) -> Profile:
    """For `workload` with micro-batches of `batch` on each of `types` that history knows anything about."""
    seen = list(history)
    measured = _seconds_by_type(seen, workload, batch)
    relative = _relative_seconds(seen)
    known = {name: measured[name] for name in types if name in measured}
    anchors = [seconds / relative[name] for name, seconds in known.items() if name in relative]
    scale = median(anchors) if anchors else 1.0
    for name in types:
        if name not in known and name in relative:
            known[name] = scale * relative[name]
    if not known:
        raise UsageError(
            f"nothing is known about {workload} on {', '.join(types)}: measure it on one of them first, or give a profile"
        )
    return Profile(
        workload, {name: Speed(((batch, batch / known[name]),)) for name in types if name in known}
    )


def _seconds_by_type(seen: Iterable[Observation], workload: str, batch: int) -> dict[str, float]:
    """Median seconds of one micro-batch; at another size than was measured, in proportion to the nearest one."""
    rates: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in seen:
        if each.workload == workload:
            rates[each.type][each.batch].append(each.samples_per_second)
    return {
        name: batch / median(sizes[min(sizes, key=lambda size: (abs(size - batch), size))])
        for name, sizes in rates.items()
    }


def _relative_seconds(seen: Sequence[Observation]) -> dict[str, float]:
    """Per type, the median over (workload, batch) of its seconds relative to the slowest type measured for the same."""
    rates: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in seen:
        rates[each.workload, each.batch][each.type].append(each.samples_per_second)
    ratios: dict[str, list[float]] = defaultdict(list)
    for by_type in rates.values():
        slowest = min(median(values) for values in by_type.values())
        for name, values in by_type.items():
            ratios[name].append(slowest / median(values))
    return {name: median(values) for name, values in ratios.items()}
