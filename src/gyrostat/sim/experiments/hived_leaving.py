"""HiveD, Figure 7 (§5.2): the tenant with the longest excess queueing leaves with its machines; then the next one."""

from __future__ import annotations

from gyrostat.sim.experiments.finding import (
    Compared,
    ExperimentContext,
    ExperimentFinding,
    Plot,
    Series,
    TextTable,
)
from gyrostat.sim.experiments.hived_trace import busy_days, compare, removed, tenants_table

ROUNDS = 3


def run(context: ExperimentContext) -> ExperimentFinding:
    jobs, nodes = busy_days(context)
    compared, tables, rows = [], [], []
    bars: dict[str, list[tuple[float, float]]] = {"quota": [], "cells": []}
    gone: list[str] = []
    for number in range(ROUNDS):
        staying = [job for job in jobs if job.request.vc not in gone]
        found = compare(context, staying, {vc: number for vc, number in nodes.items() if vc not in gone})
        label = "all tenants" if not gone else f"without {', '.join(gone)}"
        victim, quota = found.worst("quota")
        _, cells = found.worst("cells")
        waits = [found.summaries[sharing].all.queueing_mean / 60 for sharing in ("private", "quota", "cells")]
        rows.append([label, *(f"{wait:,.1f}" for wait in waits), f"{quota:,.0f} ({victim})", f"{cells:,.0f}"])
        compared.append(
            Compared(
                f"{label}: longest excess queueing with cells",
                "0",
                f"{cells:,.0f} min",
                removed(quota, cells),
            )
        )
        tables.append(tenants_table(found, label))
        for sharing, excess in (("quota", quota), ("cells", cells)):
            bars[sharing].append((float(number), excess))
        gone.append(victim)
    head = ["", "private", "quota", "cells", "worst half day by quota", "by cells"]
    return ExperimentFinding(
        name="hived-leaving",
        title="HiveD, Figure 7: tenants that suffer leave a cluster that is shared by quota",
        setup=(
            f"{len(jobs)} jobs of twenty days of the Philly trace on {sum(nodes.values())} machines (90 % load), "
            "first in first out. In each round the "
            "tenant with the longest excess queueing in half a day leaves with its machines and jobs."
        ),
        compared=compared,
        differs=(
            "In the paper the first to leave waits 7 times as long as alone, and the next suffers 1.7 times "
            "after that. Who suffers depends on "
            "the trace; with quotas somebody does in each round that shows an excess."
        ),
        tables=[TextTable("mean queueing and longest excess, minutes", head, rows), *tables],
        plots=[
            Plot(
                name="hived-leaving",
                title="longest excess queueing in half a day, of any tenant",
                x="tenants that have left",
                y="minutes",
                series=[Series(sharing, points) for sharing, points in bars.items()],
                bars=[str(number) for number in range(ROUNDS)],
            )
        ],
    )
