"""The common part of HiveD's experiments: busy days of the Philly trace, and clusters with the paper's load.

The paper's trace is not public; Philly's flat file is of the same cluster, a later and smaller extract. It has 15
tenants, of which the four with fewer than 100 jobs are left out: 11, as in the paper's Table 1. What the tenants'
quotas were is not in the file, so each has machines in proportion to the load of its jobs, at least enough for its
largest one (`setup.by_load`).

Clusters are sized by load. On average the file keeps 374 devices busy, so the paper's 279 nodes (64 % load)
correspond to 73 machines, and its 200 (90 %) to 52: that is what `hived-load`, `hived-binding` and `hived-levels`
use, with machines by each tenant's load in the whole file. The stretch of twenty days that is simulated is busier
than that average, and 52 machines are more than full then; the other experiments take as many machines as make 90 %
of the load of the stretch itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gyrostat.sched.cells.spec import CellSpec
from gyrostat.sched.policies import find_policy
from gyrostat.sched.tenant_state import Vc
from gyrostat.sim.experiments.finding import ExperimentContext, Plot, Series, TextTable
from gyrostat.sim.job import TraceJob
from gyrostat.sim.setup import by_load
from gyrostat.sim.sharing import Sharing, build, cluster_of_nodes
from gyrostat.sim.simulate import SimulationResult, simulate
from gyrostat.sim.summary import HALF_DAY, Summary, summarise
from gyrostat.sim.traces import between, read_trace

DAYS = (20, 40)
"""Of the trace: twenty busy ones."""
NORMAL, HIGH = 73, 52
"""Machines: what the paper's 279 and 200 nodes correspond to."""
_FEW_JOBS = 100
_DAY = 86_400.0


def tenants_jobs(context: ExperimentContext) -> list[TraceJob]:
    """The whole trace, without the tenants that hardly use it."""
    jobs = read_trace(context.file("philly.csv"))
    number = Counter(job.request.vc for job in jobs)
    return [job for job in jobs if number[job.request.vc] >= _FEW_JOBS]


def busy_days(
    context: ExperimentContext, nodes: int | None = None, *, load: float = 0.9
) -> tuple[list[TraceJob], dict[str, int]]:
    """The jobs of the busy days, and each tenant's machines: `nodes` divided by load in the whole trace, or as many as
    result in this `load` on these days.
    """
    jobs = tenants_jobs(context)
    chosen = list(between(jobs, *DAYS))
    if nodes is not None:
        return chosen, by_load(jobs, nodes)
    used = sum(job.duration * job.request.devices for job in chosen) / (_DAY * (DAYS[1] - DAYS[0]))
    return chosen, by_load(chosen, round(used / load / 8))


@dataclass
class SharingComparison:
    """The same jobs under several ways of sharing."""

    jobs: Sequence[TraceJob]
    spec: CellSpec
    policy: str = "fifo"
    results: dict[str, SimulationResult] = field(default_factory=dict)
    summaries: dict[str, Summary] = field(default_factory=dict)

    def run(self, context: ExperimentContext, *sharings: str, dynamic: bool = True) -> None:
        for sharing in sharings:
            context.progress(f"{self.policy}, {sharing}, {len(self.jobs)} jobs")
            fleet, placer = build(self.spec, Sharing(sharing), dynamic=dynamic)
            vcs = [Vc(name=vc.name, policy=find_policy(self.policy)) for vc in self.spec.virtual_clusters]
            result = simulate(fleet, vcs, placer, self.jobs)
            self.results[sharing] = result
            self.summaries[sharing] = summarise(
                result, policy=self.policy, sharing=sharing, private=self.results.get("private")
            )

    def suffering(self, sharing: str) -> list[str]:
        """Tenants that wait longer than in a private cluster, on average."""
        return [vc for vc, anomaly in self.summaries[sharing].anomalies.items() if anomaly.suffered]

    def worst(self, sharing: str) -> tuple[str, float]:
        """The tenant that waits longest beyond its private cluster in some half day, and the minutes."""
        anomalies = self.summaries[sharing].anomalies
        vc = max(anomalies, key=lambda vc: anomalies[vc].worst_half_day)
        return vc, anomalies[vc].worst_half_day / 60


def removed(quota: float, cells: float) -> bool | None:
    """Whether cells remove the excess queueing of quotas. None: quotas have none."""
    return False if cells > 0 else True if quota > 0 else None


def compare(
    context: ExperimentContext, jobs: Sequence[TraceJob], nodes: Mapping[str, int], policy: str = "fifo"
) -> SharingComparison:
    """Private, quota and cells."""
    comparison = SharingComparison(jobs, cluster_of_nodes(nodes), policy)
    comparison.run(context, "private", "quota", "cells")
    return comparison


def tenants_table(comparison: SharingComparison, title: str) -> TextTable:
    """Mean queueing in minutes."""
    rows = []
    for vc in sorted(comparison.summaries["private"].tenants):
        row = [vc, str(comparison.summaries["private"].tenants[vc].jobs)]
        for sharing, summary in comparison.summaries.items():
            anomaly = summary.anomalies.get(vc)
            mark = " !" if sharing != "private" and anomaly is not None and anomaly.suffered else ""
            row.append(f"{summary.tenants[vc].queueing_mean / 60:,.1f}{mark}")
        rows.append(row)
    return TextTable(
        f"{title}: mean queueing, minutes (! longer than private)",
        ["tenant", "jobs", *comparison.summaries],
        rows,
    )


def queueing_plot(comparison: SharingComparison, vc: str, name: str, title: str) -> Plot:
    """As the paper draws it: mean queueing of the jobs submitted within half a day."""
    series = []
    for sharing, result in comparison.results.items():
        records = result.records
        windows: dict[int, list[float]] = {}
        for row in records.of_vc(vc):
            windows.setdefault(int(records.submitted[row] // HALF_DAY), []).append(records.waited[row])
        first = int(comparison.jobs[0].request.submitted // HALF_DAY)
        points = [
            ((window - first) / 2, sum(waits) / len(waits) / 60) for window, waits in sorted(windows.items())
        ]
        series.append(Series(sharing, points))
    return Plot(name=name, title=title, x="days", y="mean queueing, minutes", series=series)


def fragmentation_plot(results: Mapping[str, SimulationResult], name: str, title: str) -> Plot:
    series = []
    for label, result in results.items():
        records = result.records
        nodes = len(records.fleet.nodes)
        points = [((at - records.began) / _DAY, 100 * value / nodes) for at, value in records.broken.points()]
        series.append(Series(label, [point for point in points if point[0] <= DAYS[1] - DAYS[0]]))
    return Plot(name=name, title=title, x="days", y="nodes without 8 devices together, %", series=series)
