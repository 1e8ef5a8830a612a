"""HiveD's comparison (§5.2) on traces that name no tenants: ITP's and Alibaba's, divided by rule."""

from __future__ import annotations

from collections.abc import Sequence

from gyrostat.sim.experiments.finding import (
    Compared,
    ExperimentContext,
    ExperimentFinding,
    Plot,
    Series,
    TextTable,
)
from gyrostat.sim.experiments.hived_trace import compare, removed
from gyrostat.sim.job import TraceJob
from gyrostat.sim.setup import by_load
from gyrostat.sim.traces import read_trace, tenants

TRACES = {
    "ITP 01": "itp/cluster01.csv",
    "ITP 02": "itp/cluster02.csv",
    "ITP 03": "itp/cluster03.csv",
    "ITP 05": "itp/cluster05.csv",
    "ITP 06": "itp/cluster06.csv",
    "Alibaba 2023": "alibaba2023/pods.csv",
}
TENANTS = 4
LOAD = 0.9
PER_NODE = 8


def machines(jobs: Sequence[TraceJob]) -> int:
    """Enough for a load of 90 % while jobs are submitted, and for the largest jobs."""
    span = jobs[-1].request.submitted - jobs[0].request.submitted
    used = sum(job.duration * job.request.devices for job in jobs) / max(span, 1.0)
    largest: dict[str, int] = {}
    for job in jobs:
        largest[job.request.vc] = max(largest.get(job.request.vc, 1), -(-job.request.devices // PER_NODE))
    return max(round(used / LOAD / PER_NODE), sum(largest.values()))


def run(context: ExperimentContext) -> ExperimentFinding:
    compared, rows = [], []
    bars: dict[str, list[tuple[float, float]]] = {"quota": [], "cells": []}
    for number, (name, file) in enumerate(TRACES.items()):
        jobs = tenants(read_trace(context.file(file)), TENANTS)
        nodes = by_load(jobs, machines(jobs))
        found = compare(context, jobs, nodes)
        victim, quota = found.worst("quota")
        _, cells = found.worst("cells")
        compared += [
            Compared(
                f"{name}: longest excess queueing by quota (half a day)",
                "some",
                f"{quota:,.0f} min ({victim})",
            ),
            Compared(f"{name}: the same with cells", "0", f"{cells:,.0f} min", removed(quota, cells)),
        ]
        waits = [found.summaries[sharing].all.queueing_mean / 60 for sharing in ("private", "quota", "cells")]
        suffering = [str(len(found.suffering(sharing))) for sharing in ("quota", "cells")]
        rows.append(
            [name, f"{len(jobs):,}", str(sum(nodes.values())), *(f"{w:,.1f}" for w in waits), *suffering]
        )
        for sharing, value in (("quota", quota), ("cells", cells)):
            bars[sharing].append((float(number), value))
    return ExperimentFinding(
        name="hived-traces",
        title="HiveD on other traces: ITP's and Alibaba's, divided among tenants by rule",
        setup=(
            f"These traces name no tenants. Each is divided among {TENANTS} by a hash of the job's id: half of the jobs to the "
            "first, a quarter to the second, an eighth to each of the others (`--tenants 4` of `gyrostat simulate`). "
            "Machines with 8 devices, as many as the average load fills to 90 %, or more where the tenants' largest jobs "
            "need them, divided by load. First in first out, hard affinity. Alibaba's pods that use a share of a device "
            "count as one device; those that were never scheduled are left out."
        ),
        compared=compared,
        differs=(
            "The paper has its own trace only, so there is no figure to compare with; what it claims, that quotas make some "
            "tenants wait longer than alone and cells none, is looked at in other workloads. Where quotas show no excess, "
            "cells can claim nothing."
        ),
        tables=[
            TextTable(
                "mean queueing, minutes; tenants that wait longer than alone",
                ["trace", "jobs", "machines", "private", "quota", "cells", "quota", "cells"],
                rows,
            )
        ],
        plots=[
            Plot(
                name="hived-traces",
                title="longest excess queueing in half a day, of any tenant",
                x="trace",
                y="minutes",
                series=[Series(sharing, points) for sharing, points in bars.items()],
                bars=list(TRACES),
            )
        ],
    )
