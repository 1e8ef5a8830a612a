"""HiveD, Figure 8 (§5.2): one tenant has jobs of eight devices, the others of one; then others follow, one by one."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from gyrostat.core.request import JobId
from gyrostat.sim.experiments.finding import (
    Compared,
    ExperimentContext,
    ExperimentFinding,
    Plot,
    Series,
    TextTable,
)
from gyrostat.sim.experiments.hived_trace import busy_days, compare
from gyrostat.sim.job import TraceJob

PAPER = ("132 ×", "4.3 ×", "1.9 ×", "0.9 ×")
SEED = 11


def reshape(jobs: Sequence[TraceJob], large: Collection[str]) -> list[TraceJob]:
    """Jobs of eight devices for the tenants in `large`, of one for others. A tenant's number of devices over all its
    jobs stays; when jobs are submitted, and how long they take, is drawn from its own jobs.
    """
    draw = random.Random(SEED)
    reshaped: list[TraceJob] = []
    for vc in sorted({job.request.vc for job in jobs}):
        mine = [job for job in jobs if job.request.vc == vc]
        size = 8 if vc in large else 1
        number = max(1, sum(job.request.devices for job in mine) // size)
        for k, drawn in enumerate(draw.choices(mine, k=number)):
            request = replace(drawn.request, id=JobId(f"{vc}-{k}"), devices=size)
            reshaped.append(TraceJob(request, drawn.duration))
    reshaped.sort(key=lambda job: job.request.submitted)
    return reshaped


def run(context: ExperimentContext) -> ExperimentFinding:
    jobs, nodes = busy_days(context)
    load: dict[str, float] = {}
    for job in jobs:
        load[job.request.vc] = load.get(job.request.vc, 0.0) + job.duration * job.request.devices
    order = sorted(load, key=lambda vc: -load[vc])
    watched = order[0]
    compared, rows = [], []
    bars: dict[str, list[tuple[float, float]]] = {"quota": [], "cells": []}
    for number, paper in enumerate(PAPER):
        shaped = reshape(jobs, order[: number + 1])
        found = compare(context, shaped, nodes)
        alone = found.summaries["private"].tenants[watched].queueing_mean
        ratio = {
            sharing: found.summaries[sharing].tenants[watched].queueing_mean / max(alone, 1.0)
            for sharing in ("quota", "cells")
        }
        scattered = len(shaped) / sum(job.request.devices for job in shaped)
        label = f"{number + 1} of 11 tenants with eight devices"
        compared += [
            Compared(
                f"{label} (workload fragmentation {scattered:.2f}): quota against private",
                paper,
                f"{ratio['quota']:.2f} ×",
            ),
            Compared(
                f"{label}: cells against private", "below 1 ×", f"{ratio['cells']:.2f} ×", ratio["cells"] <= 1
            ),
        ]
        worst = found.worst("quota")
        rows.append(
            [
                label,
                *(
                    f"{found.summaries[s].tenants[watched].queueing_mean / 60:,.1f}"
                    for s in ("private", "quota", "cells")
                ),
                f"{worst[1]:,.0f} ({worst[0]})",
                f"{found.worst('cells')[1]:,.0f}",
            ]
        )
        for sharing, value in ratio.items():
            bars[sharing].append((float(number), value))
    head = ["", "private", "quota", "cells", "worst half day of anybody, quota", "cells"]
    return ExperimentFinding(
        name="hived-reshaped",
        title="HiveD, Figure 8: affinity requirements reshaped",
        setup=(
            f"Twenty days of the Philly trace, reshaped with seed {SEED}; tenant {watched}, the one with the most "
            "load, has jobs of eight devices "
            f"throughout. {sum(nodes.values())} machines, first in first out."
        ),
        compared=compared,
        differs=(
            "Durations are drawn together with submission times, so load changes with the shape. Ratios to a "
            "private cluster that hardly waits are large by nature (waits below a second count as one)."
        ),
        tables=[TextTable(f"mean queueing of tenant {watched}, minutes; longest excess", head, rows)],
        plots=[
            Plot(
                name="hived-reshaped",
                title=f"queueing of {watched} against its private cluster",
                x="tenants with jobs of eight devices",
                y="times",
                series=[Series(sharing, points) for sharing, points in bars.items()],
                bars=["1", "2", "3", "4"],
            )
        ],
    )
