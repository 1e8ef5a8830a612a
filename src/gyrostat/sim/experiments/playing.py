"""One policy on one list of jobs, and its figures: the common part of the experiments."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gyrostat.core.devices import Fleet
from gyrostat.core.profile import Profile
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.planner.tables import profiles_of
from gyrostat.sched.policies import find_policy
from gyrostat.sched.port import Change
from gyrostat.sched.tenant_state import Vc
from gyrostat.sched.throughput import Throughput
from gyrostat.sim.cluster import Costs
from gyrostat.sim.experiments.finding import TextTable
from gyrostat.sim.job import TraceJob
from gyrostat.sim.simulate import SimulationResult, simulate

VC = "all"


@dataclass(frozen=True)
class PlaySummary:
    """Seconds, and the share of devices in use from the first submission to the last completion."""

    jct: Sequence[float]
    queueing: Sequence[float]
    """Until a job first runs."""
    makespan: float
    utilisation: float
    busy: Sequence[tuple[float, float]]
    """Devices in use over time."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.jct)

    @property
    def median(self) -> float:
        return statistics.median(self.jct)

    @property
    def median_queueing(self) -> float:
        return statistics.median(self.queueing)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.jct)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def play(
    fleet: Fleet,
    policy: str,
    jobs: Iterable[TraceJob],
    throughput: Throughput,
    *,
    costs: Costs | None = None,
    changes: Iterable[Iterator[tuple[float, Change]]] = (),
    horizon: float | None = None,
) -> SimulationResult:
    """Run all jobs in one VC that may use the whole fleet."""
    vc = Vc(name=VC, policy=find_policy(policy))
    return simulate(
        fleet,
        [vc],
        NodePlacer(fleet),
        jobs,
        throughput=throughput,
        costs=costs,
        changes=changes,
        horizon=horizon,
    )


def summarise(result: SimulationResult, fleet: Fleet) -> PlaySummary:
    """The figures of a simulation in which all jobs finished."""
    assert not result.unfinished, (
        f"{len(result.unfinished)} jobs did not finish, such as {result.unfinished[0]}"
    )
    records = result.records
    jct = [end - start for start, end in zip(records.submitted, records.finished, strict=True)]
    queueing = [end - start for start, end in zip(records.submitted, records.started, strict=True)]
    makespan = max(records.finished) - min(records.submitted)
    return PlaySummary(
        jct, queueing, makespan, records.busy.integral / (len(fleet) * makespan), records.busy.points()
    )


def table(title: str, summaries: Iterable[tuple[str, PlaySummary]]) -> TextTable:
    """One row per policy."""
    columns = ("", "mean JCT", "median JCT", "p95 JCT", "median queueing", "makespan", "devices in use")
    rows = [
        (
            name,
            *(f"{value:,.0f} s" for value in (each.mean, each.median, each.percentile(0.95))),
            f"{each.median_queueing:,.0f} s",
            f"{each.makespan:,.0f} s",
            f"{100 * each.utilisation:.1f} %",
        )
        for name, each in summaries
    ]
    return TextTable(title, columns, rows)


def read_profiles(path: Path) -> dict[str, Profile]:
    return profiles_of(json.loads(path.read_text()))
