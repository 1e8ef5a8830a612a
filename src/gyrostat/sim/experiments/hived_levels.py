"""HiveD, Figure 11 (§5.3): cells of several levels fragment fewer nodes than cells of whole machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gyrostat.sim.experiments.finding import Compared, ExperimentContext, ExperimentFinding, less
from gyrostat.sim.experiments.hived_trace import (
    DAYS,
    NORMAL,
    SharingComparison,
    busy_days,
    fragmentation_plot,
)
from gyrostat.sim.job import TraceJob
from gyrostat.sim.sharing import cluster_of_cells, cluster_of_nodes
from gyrostat.sim.simulate import SimulationResult

_LEVELS = {1: 0, 2: 1, 4: 2}
"""Devices of a job that is smaller than a machine, and the level of its cell."""


def cells_by_demand(jobs: Sequence[TraceJob], nodes: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """As many devices as before, in cells of the levels that a tenant's jobs need, by device-seconds; at least one
    whole machine's worth of devices stays in machines where the tenant's largest job needs it.
    """
    cells: dict[str, dict[int, int]] = {}
    for vc, number in nodes.items():
        mine = [job for job in jobs if job.request.vc == vc]
        whole = sum(job.duration * job.request.devices for job in mine)
        largest = max(job.request.devices for job in mine)
        left, levels = 8 * number, {}
        keep = -(-largest // 8) * 8 if largest > 4 else 0
        for size, level in _LEVELS.items():
            share = (
                sum(job.duration * job.request.devices for job in mine if job.request.devices == size) / whole
            )
            # In whole machines' worth, so that what remains is machines.
            devices = min(round(share * number) * 8, left - keep)
            if devices > 0:
                levels[level] = devices // size
                left -= devices
        levels[3] = left // 8
        cells[vc] = {level: count for level, count in sorted(levels.items()) if count}
    return cells


def run(context: ExperimentContext) -> ExperimentFinding:
    jobs, nodes = busy_days(context, NORMAL)
    single = SharingComparison(jobs, cluster_of_nodes(nodes))
    single.run(context, "cells")
    multi = SharingComparison(jobs, cluster_of_cells(cells_by_demand(jobs, nodes), nodes=sum(nodes.values())))
    multi.run(context, "cells")
    before, after = (one.summaries["cells"].fragmentation for one in (single, multi))
    results = {"machines only": single.results["cells"], "several levels": multi.results["cells"]}
    curves = [_in_window(result, DAYS[1] - DAYS[0]) for result in results.values()]
    gaps = [100 * (a - b) for a, b in zip(*curves, strict=False)]
    compared = [
        Compared("largest gap in fragmentation, of all nodes", "20 %", f"{max(gaps):.1f} %", max(gaps) >= 20),
        Compared(
            "share of the time with less fragmentation",
            "all",
            f"{100 * sum(gap > 0 for gap in gaps) / len(gaps):.0f} %",
        ),
        Compared(
            "fragmentation on average",
            "10 % of nodes less, mostly",
            f"{100 * before:.1f} % → {100 * after:.1f} % ({less(before, after):.1f} % less)",
            after < before,
        ),
    ]
    return ExperimentFinding(
        name="hived-levels",
        title="HiveD, Figure 11: fragmentation with cells of several levels, and with whole machines only",
        setup=(
            f"{len(jobs)} jobs of twenty days of the Philly trace on {sum(nodes.values())} machines (64 % load), "
            "first in first out. Fragmentation is "
            "the share of nodes on which a guaranteed job runs, so that no other can have all eight devices. "
            "Each tenant has the same number "
            "of devices in both cases, by level as its jobs ask for them (by device-seconds)."
        ),
        compared=compared,
        differs=(
            "The assignment by level is ours; the paper says that it matches demand and gives no numbers. Tenants here are few "
            "and most machines belong to those with large jobs, so that little is left to be packed across tenants."
        ),
        plots=[fragmentation_plot(results, "hived-levels", "fragmentation")],
    )


def _in_window(result: SimulationResult, days: int) -> list[float]:
    """The share of fragmented nodes while jobs were still submitted."""
    records = result.records
    points = records.broken.points()
    return [value / len(records.fleet.nodes) for at, value in points if at - records.began <= days * 86_400]
