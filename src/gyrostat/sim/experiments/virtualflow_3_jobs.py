"""VirtualFlow §6.4.1: three jobs of rising priority on 4 V100s."""

from __future__ import annotations

from gyrostat.core.devices import Fleet
from gyrostat.sim.experiments.finding import (
    Compared,
    ExperimentContext,
    ExperimentFinding,
    Plot,
    Series,
    TextTable,
    less,
    percent,
    seconds,
)
from gyrostat.sim.experiments.playing import play, summarise
from gyrostat.sim.experiments.virtualflow_traces import VirtualFlowTrace

STRETCHES = (1.0, 2.0, 4.0, 6.0)
SHOWN = 4.0


def run(context: ExperimentContext) -> ExperimentFinding:
    fleet = Fleet.parse("v100:1x4")
    trace = VirtualFlowTrace(context, "jobs3.json")
    rows = []
    for stretch in STRETCHES:
        context.progress(f"{stretch:g} times the work")
        results = [
            play(fleet, policy, trace.jobs(elastic=elastic, stretch=stretch), trace.throughput)
            for policy, elastic in (("priority", False), ("wfs", True))
        ]
        static, fair = (summarise(result, fleet) for result in results)
        urgent = [
            dict(zip(result.records.ids, each.jct, strict=True))["job2"]
            for result, each in zip(results, (static, fair), strict=True)
        ]
        rows.append((stretch, static, fair, urgent))
    _, static, fair, urgent = next(row for row in rows if row[0] == SHOWN)
    makespan, first = less(static.makespan, fair.makespan), less(*urgent)
    return ExperimentFinding(
        name="virtualflow-3-jobs",
        title="VirtualFlow: 3 jobs, elastic fair shares against static priority",
        setup=(
            "The released trace of 3 jobs on 4 V100: two BERT fine-tunings that want 4 devices and a "
            "ResNet-56 that wants 2; the last to come is the most urgent. Policies and throughput as with 20 "
            "jobs. By the profiles alone the first job has ended before the second comes; the comparison is "
            f"at {SHOWN:g} times the work, where all three meet as in the paper's Figure 10."
        ),
        compared=[
            Compared("makespan", "38 % less", f"{percent(makespan)} less"),
            Compared("JCT of the most urgent job", "45 % less", f"{percent(first)} less"),
        ],
        differs=(
            "Without the exchange of gradients a job on 4 devices is exactly four times as fast as on one, so "
            "elasticity only fills devices that static priority leaves idle; the paper's jobs also run more "
            "efficiently on fewer devices."
        ),
        tables=[
            TextTable(
                "By how much work the jobs have",
                ("work", "makespan, static", "elastic", "most urgent job, static", "elastic"),
                [
                    (f"{k:g} x", seconds(s.makespan), seconds(f.makespan), seconds(u[0]), seconds(u[1]))
                    for k, s, f, u in rows
                ],
            )
        ],
        plots=[
            Plot(
                name="virtualflow-3-jobs",
                title=f"3 jobs on 4 V100, {SHOWN:g} times the work",
                x="seconds",
                y="devices in use",
                series=[
                    Series("static priority", static.busy, steps=True),
                    Series("elastic fair shares", fair.busy, steps=True),
                ],
            )
        ],
    )
