"""The figures of a simulation: completion times, queueing, utilisation, fragmentation; of all jobs and of each tenant.

JCT is the time from submission to completion. Queueing is all time in between without devices, also after a preemption. An
anomaly is a tenant that waits longer in the shared cluster than in a private one of its size, on average; the worst half day
shows temporary ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gyrostat.sim.records import Records
from gyrostat.sim.simulate import SimulationResult

HALF_DAY = 43_200.0


@dataclass(frozen=True)
class Figures:
    """Figures of a set of jobs, in seconds."""

    jobs: int
    jct_mean: float
    jct_median: float
    jct_p95: float
    jct_p99: float
    queueing_mean: float
    queueing_median: float
    queueing_p95: float
    preemptions: int
    migrations: int


@dataclass(frozen=True)
class Anomaly:
    """A tenant's queueing compared with a private cluster."""

    private_mean: float
    shared_mean: float
    worst_half_day: float
    """The largest difference of means over jobs submitted within half a day, in seconds; 0 if never longer."""

    @property
    def suffered(self) -> bool:
        return self.shared_mean > self.private_mean * (1 + 1e-9) + 1e-6


@dataclass(frozen=True)
class Summary:
    """Figures of a whole run. File format: the fields are members of report.json."""

    policy: str
    sharing: str
    all: Figures
    tenants: dict[str, Figures]
    anomalies: dict[str, Anomaly]
    """By tenant; empty without a private run to compare with."""
    makespan: float
    utilisation: float
    """Share of device-seconds in use."""
    fragmentation: float
    """Share of nodes of which a guaranteed job has a device, on average over time."""
    preempted_devices: int
    unfinished: int
    events: int
    ticks: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    result: SimulationResult, *, policy: str, sharing: str, private: SimulationResult | None = None
) -> Summary:
    records = result.records
    length = max(records.ended - records.began, 1e-9)
    mine = waits_by_tenant(records)
    alone = {} if private is None else waits_by_tenant(private.records)
    return Summary(
        policy=policy,
        sharing=sharing,
        all=_figures(records, range(len(records))),
        tenants={vc: _figures(records, records.of_vc(vc)) for vc in sorted(records.vcs)},
        anomalies={vc: _anomaly(mine[vc], alone[vc]) for vc in sorted(mine) if vc in alone},
        makespan=length,
        utilisation=records.busy.integral / (len(records.fleet) * length),
        fragmentation=records.broken.integral / (len(records.fleet.nodes) * length),
        preempted_devices=records.preempted_devices,
        unfinished=len(result.unfinished),
        events=result.events,
        ticks=result.ticks,
    )


def waits_by_tenant(records: Records) -> dict[str, dict[str, tuple[float, float]]]:
    """By tenant and job: when it was submitted, and how long it waited."""
    waits: dict[str, dict[str, tuple[float, float]]] = {vc: {} for vc in records.vcs}
    for row, id_ in enumerate(records.ids):
        waits[records.vcs[records.vc[row]]][id_] = (records.submitted[row], records.waited[row])
    return waits


def _anomaly(shared: dict[str, tuple[float, float]], private: dict[str, tuple[float, float]]) -> Anomaly:
    """Over the jobs that finished in both."""
    both = [id_ for id_ in shared if id_ in private]
    if not both:
        return Anomaly(0.0, 0.0, 0.0)
    windows: dict[int, list[float]] = {}
    for id_ in both:
        submitted, waited = shared[id_]
        windows.setdefault(int(submitted // HALF_DAY), []).append(waited - private[id_][1])
    return Anomaly(
        statistics.fmean(private[id_][1] for id_ in both),
        statistics.fmean(shared[id_][1] for id_ in both),
        max(0.0, *(statistics.fmean(window) for window in windows.values())),
    )


def _figures(records: Records, rows: Sequence[int]) -> Figures:
    times = sorted(records.finished[row] - records.submitted[row] for row in rows)
    waits = sorted(records.waited[row] for row in rows)
    return Figures(
        jobs=len(rows),
        jct_mean=_mean(times),
        jct_median=percentile(times, 50),
        jct_p95=percentile(times, 95),
        jct_p99=percentile(times, 99),
        queueing_mean=_mean(waits),
        queueing_median=percentile(waits, 50),
        queueing_p95=percentile(waits, 95),
        preemptions=sum(records.preemptions[row] for row in rows),
        migrations=sum(records.migrations[row] for row in rows),
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.fmean(listed) if listed else 0.0


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of ascending values that at least this percentage of them do not exceed."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
