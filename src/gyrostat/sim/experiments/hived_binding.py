"""HiveD, Figure 10 (§5.3): cells that are bound when needed spare borrowers that fixed ones drive out."""

from __future__ import annotations

from gyrostat.sim.experiments.finding import (
    Compared,
    Context,
    Finding,
    Plot,
    Series,
    TextTable,
    less,
    percent,
)
from gyrostat.sim.experiments.hived_trace import NORMAL, Comparison, busy_days
from gyrostat.sim.sharing import cluster_of_nodes

PAPER = 55.0


def run(context: Context) -> Finding:
    jobs, nodes = busy_days(context, NORMAL)
    found: dict[str, Comparison] = {}
    for label in ("static", "dynamic"):
        found[label] = Comparison(jobs, cluster_of_nodes(nodes))
        found[label].run(context, "cells", dynamic=label == "dynamic")
    summaries = {label: one.summaries["cells"] for label, one in found.items()}
    fewer = less(summaries["static"].preempted_devices, summaries["dynamic"].preempted_devices)
    return Finding(
        name="hived-binding",
        title="HiveD, Figure 10: preempted devices with dynamic and static binding",
        setup=(
            f"{len(jobs)} jobs of twenty days of the Philly trace on {sum(nodes.values())} machines (64 % load), "
            "first in first out. Static: every "
            "cell of a tenant is the same machine from beginning to end."
        ),
        compared=[Compared("fewer preempted devices", percent(PAPER), percent(fewer), fewer >= PAPER)],
        differs=(
            "In these days one tenant submits thousands of single-device jobs at a time and borrows all that is idle, so there "
            "is seldom a cell without borrowers to bind instead; at 64 % load of the stretch itself (108 machines) both ways "
            "preempt the same few. The paper's borrowers left more to choose from."
        ),
        tables=[
            TextTable(
                "preemptions",
                ["binding", "jobs preempted", "devices preempted", "mean queueing, minutes"],
                [
                    [
                        label,
                        f"{one.all.preemptions}",
                        f"{one.preempted_devices}",
                        f"{one.all.queueing_mean / 60:.1f}",
                    ]
                    for label, one in summaries.items()
                ],
            )
        ],
        plots=[
            Plot(
                name="hived-binding",
                title="devices that borrowers lost, by tenth of the time",
                x="tenths of the days in which jobs were submitted",
                y="devices",
                series=[Series(label, _by_tenth(one)) for label, one in found.items()],
                bars=[str(tenth + 1) for tenth in range(10)],
            )
        ],
    )


def _by_tenth(comparison: Comparison) -> list[tuple[float, float]]:
    """Devices preempted in each tenth of the stretch; what comes after the last submission counts for the last."""
    records = comparison.results["cells"].records
    began, ended = (comparison.jobs[place].request.submitted for place in (0, -1))
    lost = [0.0] * 10
    for at, devices in zip(records.preempted_at, records.preempted, strict=True):
        lost[min(9, int(10 * (at - began) / (ended - began)))] += devices
    return [(float(tenth), devices) for tenth, devices in enumerate(lost)]
