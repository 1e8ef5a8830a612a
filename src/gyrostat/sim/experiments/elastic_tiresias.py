"""EDL §6.3, Table 4: Elastic-Tiresias against Tiresias on the Philly trace."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from gyrostat.core.devices import Fleet
from gyrostat.core.request import Affinity, JobRequest
from gyrostat.sched.planner.throughput import workload_name
from gyrostat.sched.throughput import AnalyticScaling
from gyrostat.sim.experiments.finding import (
    Compared,
    ExperimentContext,
    ExperimentFinding,
    Plot,
    Series,
    less,
    percent,
)
from gyrostat.sim.experiments.playing import VC, PlaySummary, play, summarise, table
from gyrostat.sim.job import TraceJob
from gyrostat.sim.traces import read_trace

TYPE, PER_NODE = "v100", 8
NODES = 47
OVERHEAD = 0.129
"""Of analytic scaling: 8 devices are 4.2 times as fast as one."""
SEED = 4
PER_DEVICE = 4  # virtual workers per device asked for
WORKLOADS = (("ResNet-18", 16), ("ResNet-50", 16), ("Transformer", 16), ("LM", 10))
POLICIES = {
    "Tiresias": "tiresias:queues=500/10000,order=start",
    "Elastic-Tiresias": "elastic-tiresias:queues=500/10000,order=start,crowd=10,least=0.5",
}
PAPER = {"mean": (235_068, 24_658, 89.5), "median": (1_080, 561, 48.1), "95th": (1_914_470, 88_886, 95.4)}


def philly_jobs(path: Path, *, elastic: bool, most: int | None = None) -> Iterator[TraceJob]:
    """All jobs, or the first `most`, with models."""
    return with_models(read_trace(path)[:most], elastic=1.0 if elastic else 0.0)


def with_models(
    jobs: Iterable[TraceJob], *, elastic: float, affinity: Affinity = Affinity.SOFT
) -> Iterator[TraceJob]:
    """Models drawn evenly; a share of the jobs is elastic, from one device to one per virtual worker."""
    draw, choose = random.Random(SEED), random.Random(SEED + 1)
    for job in jobs:
        profile, batch = draw.choice(WORKLOADS)
        devices = job.request.devices
        stretches = choose.random() < elastic
        request = JobRequest(
            id=job.request.id,
            vc=VC,
            submitted=job.request.submitted,
            devices=devices,
            min_devices=1 if stretches else None,
            max_devices=PER_DEVICE * devices if stretches else None,
            virtual_workers=PER_DEVICE * devices,
            affinity=affinity,
            workload=workload_name(profile, batch),
        )
        yield TraceJob(request, job.duration)


def run(context: ExperimentContext) -> ExperimentFinding:
    philly = context.file("philly.csv")
    throughput = AnalyticScaling(overhead=OVERHEAD)
    fleet = Fleet.uniform(TYPE, NODES, PER_NODE)
    found: dict[str, PlaySummary] = {}
    worth = 0.0
    for name, policy in POLICIES.items():
        context.progress(f"{name}, 82,247 jobs on {len(fleet)} devices")
        jobs = list(philly_jobs(philly, elastic=name == "Elastic-Tiresias"))
        worth = sum(job.duration * _worth(job.request.devices) for job in jobs)
        found[name] = summarise(play(fleet, policy, jobs, throughput), fleet)
    before, after = found.values()
    efficiency = {name: worth / (len(fleet) * each.makespan) for name, each in found.items()}
    figures = {
        "mean": (before.mean, after.mean),
        "median": (before.median, after.median),
        "95th": (before.percentile(0.95), after.percentile(0.95)),
    }
    targets = {"mean": 89.5, "median": 48.0, "95th": 95.0}
    return ExperimentFinding(
        name="elastic-tiresias",
        title="EDL: Elastic-Tiresias against Tiresias on the Philly trace",
        setup=(
            f"The whole flat Philly trace on {NODES} nodes with 8 V100 each, load 1.0. The paper tells neither its load, nor "
            "how its models scale nor how Tiresias orders the jobs of one queue; these were chosen so that Tiresias' own "
            "figures come out, and then Elastic-Tiresias' do: by first start within a queue (`order=start`), and 8 devices "
            "are 4.2 times as fast as one. Devices are counted without locality (soft affinity), as in the simulator that the "
            "paper used. Queues at 500 and 10,000 device-seconds, N = 10, r = 0.5; R1 scans all waiting jobs. Each device "
            "asked for has four virtual workers, which bound how far a job can grow. R1's floor r is read as one for running "
            "jobs that give devices up, not for what a waiting job starts on. Resizes are free, as in the paper's simulation. "
            "`elastic-tiresias-why` changes each of these choices alone."
        ),
        compared=[
            Compared(
                f"{name} JCT",
                f"{paper[0]:,} to {paper[1]:,} s: {paper[2]} % less",
                f"{figures[name][0]:,.0f} to {figures[name][1]:,.0f} s: {percent(less(*figures[name]))} less",
                less(*figures[name]) >= targets[name],
            )
            for name, paper in PAPER.items()
        ]
        + [
            Compared(
                "cluster efficiency (Figure 12), mean",
                "higher than Tiresias'",
                f"{percent(100 * efficiency['Tiresias'])} to {percent(100 * efficiency['Elastic-Tiresias'])}",
                efficiency["Elastic-Tiresias"] > efficiency["Tiresias"],
            )
        ],
        differs=(
            "The number of nodes was chosen so that Tiresias' own mean is the paper's; with 55 and 50 nodes the mean is 88.8 % "
            "and 90.2 % less. Mean and 95th percentile come out. The median does not: half of the jobs are short, "
            "and run at once in the first queue under both policies; they only gain by idle devices, which go to running jobs "
            "when nobody waits (R2), and here somebody nearly always does. No reading that was tried explains it. Most of the "
            "gain is against an order in which preempted jobs of a queue take devices back from running ones: where running "
            "jobs come first, as `tiresias` does by default, Tiresias' own mean falls to a fifth, and Elastic-Tiresias gains "
            "54 % of the mean and nothing at the 95th percentile (`elastic-tiresias-why`, a quarter of the trace)."
        ),
        tables=[table(f"{NODES} nodes", found.items())],
        plots=[
            Plot(
                name="elastic-tiresias",
                title="Jobs by completion time, Philly",
                x="JCT, seconds",
                y="share of jobs",
                log_x=True,
                series=[Series(name, _distribution(each)) for name, each in found.items()],
            ),
            Plot(
                name="elastic-tiresias-busy",
                title=f"Devices in use of {len(fleet)}",
                x="days",
                y="devices",
                series=[
                    Series(name, [(now / 86_400, busy) for now, busy in each.busy])
                    for name, each in found.items()
                ],
            ),
        ],
    )


def _worth(devices: int) -> float:
    """Devices of a job, weighted by their efficiency: relative to one device alone."""
    return devices / (1 + OVERHEAD * (devices - 1))


def _distribution(summary: PlaySummary) -> list[tuple[float, float]]:
    ordered = sorted(summary.jct)
    return [(ordered[int(share / 200 * (len(ordered) - 1))], share / 200) for share in range(201)]
