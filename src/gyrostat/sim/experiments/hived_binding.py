"""HiveD, Figure 10 (§5.3): dynamic binding preempts fewer borrowers than static binding."""

from __future__ import annotations

from gyrostat.sim.experiments.finding import (
    Compared,
    ExperimentContext,
    ExperimentFinding,
    Plot,
    Series,
    TextTable,
    less,
    percent,
)
from gyrostat.sim.experiments.hived_trace import NORMAL, SharingComparison, busy_days
from gyrostat.sim.sharing import cluster_of_nodes

PAPER = 55.0
BINDINGS = ("static", "dynamic")


def run(context: ExperimentContext) -> ExperimentFinding:
    clusters = {
        "64 % of the whole trace": busy_days(context, NORMAL),
        "64 % of these days": busy_days(context, load=0.64),
    }
    found: dict[tuple[str, str], SharingComparison] = {}
    for load, (jobs, nodes) in clusters.items():
        for binding in BINDINGS:
            found[load, binding] = SharingComparison(jobs, cluster_of_nodes(nodes))
            found[load, binding].run(context, "cells", dynamic=binding == "dynamic")
    fewer = {
        load: less(*(found[load, binding].summaries["cells"].preempted_devices for binding in BINDINGS))
        for load in clusters
    }
    shown = next(iter(clusters))
    return ExperimentFinding(
        name="hived-binding",
        title="HiveD, Figure 10: preempted devices with dynamic and static binding",
        setup=(
            f"{len(clusters[shown][0])} jobs of twenty days of the Philly trace, first in first out, on "
            f"{' and on '.join(str(sum(nodes.values())) for _, nodes in clusters.values())} machines: 64 % load on average "
            "over the whole trace, as in the paper, and over these busy days. Static: every cell of a tenant is the same "
            "machine from beginning to end."
        ),
        compared=[
            Compared(f"fewer preempted devices, {load}", percent(PAPER), percent(each), each >= PAPER)
            for load, each in fewer.items()
        ],
        differs=(
            "In these days one tenant submits thousands of single-device jobs at a time and borrows all that is idle, so there "
            "is seldom a cell without borrowers to bind instead, and what is bound hardly matters. The paper's borrowers left "
            "more to choose from."
        ),
        tables=[
            TextTable(
                "preemptions",
                ["load", "binding", "jobs preempted", "devices preempted", "mean queueing, minutes"],
                [_row(load, binding, one) for (load, binding), one in found.items()],
            )
        ],
        plots=[
            Plot(
                name="hived-binding",
                title="devices that borrowers lost, by tenth of the time",
                x="tenths of the days in which jobs were submitted",
                y="devices",
                series=[Series(binding, _by_tenth(found[shown, binding])) for binding in BINDINGS],
                bars=[str(tenth + 1) for tenth in range(10)],
            )
        ],
    )


def _row(load: str, binding: str, comparison: SharingComparison) -> list[str]:
    one = comparison.summaries["cells"]
    return [
        load,
        binding,
        f"{one.all.preemptions}",
        f"{one.preempted_devices}",
        f"{one.all.queueing_mean / 60:.1f}",
    ]


def _by_tenth(comparison: SharingComparison) -> list[tuple[float, float]]:
    """Devices preempted in each tenth of the period; preemptions after the last submission count for the last."""
    records = comparison.results["cells"].records
    began, ended = (comparison.jobs[place].request.submitted for place in (0, -1))
    lost = [0.0] * 10
    for at, devices in zip(records.preempted_at, records.preempted, strict=True):
        lost[min(9, int(10 * (at - began) / (ended - began)))] += devices
    return [(float(tenth), devices) for tenth, devices in enumerate(lost)]
