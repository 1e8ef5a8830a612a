"""HiveD, Figure 9 (§5.2): some jobs accept any devices, without being slower. Anomalies stay under quotas."""

from __future__ import annotations

import random
from dataclasses import replace

from gyrostat.core.request import Affinity
from gyrostat.sim.experiments.finding import (
    Compared,
    ExperimentContext,
    ExperimentFinding,
    Plot,
    Series,
    TextTable,
)
from gyrostat.sim.experiments.hived_trace import busy_days, compare, removed
from gyrostat.sim.job import TraceJob

SHARES = (0.25, 0.50, 0.75)
SEED = 7


def soften(jobs: list[TraceJob], share: float) -> list[TraceJob]:
    """Give a random share of the jobs with several devices soft affinity."""
    draw = random.Random(SEED)
    return [
        replace(job, request=replace(job.request, affinity=Affinity.SOFT))
        if job.request.devices > 1 and draw.random() < share
        else job
        for job in jobs
    ]


def run(context: ExperimentContext) -> ExperimentFinding:
    jobs, nodes = busy_days(context)
    compared, rows = [], []
    bars: dict[str, list[tuple[float, float]]] = {"private": [], "quota": [], "cells": []}
    for number, share in enumerate(SHARES):
        found = compare(context, soften(jobs, share), nodes)
        victim, quota = found.worst("quota")
        _, cells = found.worst("cells")
        label = f"{100 * share:.0f} % soft"
        compared += [
            Compared(
                f"{label}: longest excess queueing by quota (half a day)",
                "some",
                f"{quota:,.0f} min ({victim})",
            ),
            Compared(f"{label}: the same with cells", "0", f"{cells:,.0f} min", removed(quota, cells)),
        ]
        suffering = [len(found.suffering(sharing)) for sharing in ("quota", "cells")]
        waits = {sharing: summary.all.queueing_mean / 60 for sharing, summary in found.summaries.items()}
        rows.append([label, *(f"{wait:,.1f}" for wait in waits.values()), *map(str, suffering)])
        for sharing, wait in waits.items():
            bars[sharing].append((float(number), wait))
    return ExperimentFinding(
        name="hived-soft",
        title="HiveD, Figure 9: sharing anomalies when 25, 50 and 75 % of the larger jobs have soft affinity",
        setup=(
            f"{len(jobs)} jobs of twenty days of the Philly trace on {sum(nodes.values())} machines (90 % load), "
            "first in first out. Soft jobs "
            f"are drawn with seed {SEED} and run as fast scattered, the paper's most optimistic assumption."
        ),
        compared=compared,
        differs=(
            "Which jobs are soft is drawn anew; the paper shows one tenant's average (1.3 times its private "
            "cluster's "
            "at 50 %)."
        ),
        tables=[
            TextTable(
                "mean queueing, minutes; tenants that wait longer than alone",
                ["", "private", "quota", "cells", "quota", "cells"],
                rows,
            )
        ],
        plots=[
            Plot(
                name="hived-soft",
                title="mean queueing of all jobs",
                x="share of larger jobs with soft affinity",
                y="minutes",
                series=[Series(sharing, points) for sharing, points in bars.items()],
                bars=[f"{100 * share:.0f} %" for share in SHARES],
            )
        ],
    )
