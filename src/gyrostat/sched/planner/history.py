"""A first profile for a job that has never run, from measurements of other jobs (so EasyScale seeds its companion).

If the workload was measured on the type: the median. If it was measured on other types only: its speed there, times the
median ratio between the types over workloads that ran on both. If the workload was never measured: the median ratios
relative to the slowest type, because only ratios between types matter for a first decision. The first measurement corrects
the profile (`companion.Companion.measured`).
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
    """The profile of `workload` with micro-batches of `batch` on each of `types` with any measurement."""
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
            f"{workload} was measured on none of {', '.join(types)}: measure it on one of them first, or give a profile"
        )
    return Profile(
        workload, {name: Speed(((batch, batch / known[name]),)) for name in types if name in known}
    )


def _seconds_by_type(seen: Iterable[Observation], workload: str, batch: int) -> dict[str, float]:
    """Median seconds of one micro-batch; for an unmeasured size, in proportion to the nearest measured one."""
    rates: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in seen:
        if each.workload == workload:
            rates[each.type][each.batch].append(each.samples_per_second)
    return {
        name: batch / median(sizes[min(sizes, key=lambda size: (abs(size - batch), size))])
        for name, sizes in rates.items()
    }


def _relative_seconds(seen: Sequence[Observation]) -> dict[str, float]:
    """By type, the median over (workload, batch) of its seconds relative to the slowest type measured for the same."""
    rates: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in seen:
        rates[each.workload, each.batch][each.type].append(each.samples_per_second)
    ratios: dict[str, list[float]] = defaultdict(list)
    for by_type in rates.values():
        slowest = min(median(values) for values in by_type.values())
        for name, values in by_type.items():
            ratios[name].append(slowest / median(values))
    return {name: median(values) for name, values in ratios.items()}
