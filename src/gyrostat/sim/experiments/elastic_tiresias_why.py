"""Which factors determine the gain of Elastic-Tiresias: one factor at a time, on a quarter of the Philly trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gyrostat.core.devices import Fleet
from gyrostat.core.request import Affinity
from gyrostat.sched.planner.throughput import PlannedThroughput
from gyrostat.sched.throughput import AnalyticScaling, Throughput
from gyrostat.sim.experiments.elastic_tiresias import OVERHEAD, PER_NODE, TYPE, with_models
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
from gyrostat.sim.experiments.playing import PlaySummary, play, read_profiles, summarise
from gyrostat.sim.job import TraceJob
from gyrostat.sim.traces import read_trace

EVERY = 4
"""One in this many jobs of the whole trace is run, on a cluster that is smaller in proportion."""
LOAD = 1.0
"""As in `elastic-tiresias`: 374 devices wanted on average, of 376."""
DAY = 86_400.0
TIRESIAS = "tiresias:queues=500/10000"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a run differs from the others."""

    name: str
    load: float = LOAD
    """Devices wanted on average, of those there are."""
    overhead: float | None = OVERHEAD
    """Of analytic scaling; None: Gavel's models."""
    affinity: Affinity = Affinity.SOFT
    order: str = "start"
    """Of jobs of one queue."""
    inelastic: float = 0.0
    longest: float | None = None
    """Durations are cut off there."""
    crowd: int = 10


AS_IT_IS = Variant(
    name=f"as it is: load {LOAD:g}, 8 devices 4.2 times as fast as one, soft affinity, by first start, all elastic"
)
VARIANTS = (
    AS_IT_IS,
    Variant(name="in a queue, the order of Tiresias' simulator", order="simulator"),
    Variant(name="in a queue, running jobs first", order="running"),
    Variant(name="load 0.85", load=0.85),
    Variant(name="load 0.7", load=0.7),
    Variant(name="N = 2: smaller with the cluster", crowd=2),
    Variant(name="models that scale perfectly", overhead=0.0),
    Variant(name="8 devices are 4.7 times as fast as one", overhead=0.1),
    Variant(name="Gavel's models", overhead=None),
    Variant(name="hard affinity: one node, or as few as can hold it", affinity=Affinity.HARD),
    Variant(name="half of the jobs inelastic", inelastic=0.5),
    Variant(name="no job longer than two days", longest=2 * DAY),
)


def prepared(jobs: Sequence[TraceJob], variant: Variant) -> tuple[list[TraceJob], int]:
    """The jobs of a variant that fit into its smaller cluster, and the number of nodes for its load."""
    span = jobs[-1].request.submitted - jobs[0].request.submitted
    chosen = list(jobs)
    if variant.longest is not None:
        chosen = [replace(job, duration=min(job.duration, variant.longest)) for job in chosen]
    used = sum(job.duration * job.request.devices for job in chosen) / span
    nodes = max(1, round(used / variant.load / PER_NODE))
    return [job for job in chosen if job.request.devices <= nodes * PER_NODE], nodes


def run(context: ExperimentContext) -> ExperimentFinding:
    jobs = read_trace(context.file("philly.csv"))[::EVERY]
    gavel = PlannedThroughput(read_profiles(context.file("gavel_throughputs.json")))
    found: dict[Variant, tuple[int, PlaySummary, PlaySummary]] = {}
    plain: dict[tuple[Affinity, str, float | None, int], PlaySummary] = {}
    for number, variant in enumerate(VARIANTS, 1):
        context.progress(f"{number} of {len(VARIANTS)}: {variant.name}")
        chosen, nodes = prepared(jobs, variant)
        same = (variant.affinity, variant.order, variant.longest, nodes)
        tiresias = f"{TIRESIAS},order={variant.order}"
        if same not in plain:  # what jobs would gain by other devices is nothing to Tiresias
            plain[same] = _played(tiresias, chosen, nodes, 0.0, variant, gavel)
        throughput = gavel if variant.overhead is None else AnalyticScaling(overhead=variant.overhead)
        policy = f"elastic-{tiresias},crowd={variant.crowd},least=0.5"
        elastic = _played(policy, chosen, nodes, 1.0 - variant.inelastic, variant, throughput)
        found[variant] = (nodes, plain[same], elastic)
    gains = {variant: less(before.mean, after.mean) for variant, (_, before, after) in found.items()}
    most = max(gains, key=lambda variant: gains[variant])
    return ExperimentFinding(
        name="elastic-tiresias-why",
        title="EDL: what decides how much Elastic-Tiresias gains",
        setup=(
            f"One in {EVERY} jobs of the whole Philly trace, {len(jobs):,}, on a cluster that is smaller in proportion. Each "
            "row changes one thing; the cluster is sized so that the load is as given. All else is as in `elastic-tiresias`."
        ),
        compared=[
            Compared("mean JCT, as it is", "89.5 % less", f"{percent(gains[AS_IT_IS])} less"),
            Compared(f"mean JCT at best ({most.name})", "89.5 % less", f"{percent(gains[most])} less"),
        ],
        differs=(
            "What Tiresias does with jobs of one queue decides most. By first start, an older job that was preempted takes its "
            "devices back from a running one, so many long jobs are begun and few finish; compaction undoes that. Where "
            "running jobs come first, Tiresias alone finishes long jobs one after another, and Elastic-Tiresias, which "
            "runs more of them at once, gains less of the mean and loses at the 95th percentile. Then how badly models "
            "scale: where they scale perfectly compaction has nothing to gain. Then the load, and affinity. Under none of "
            "these is nobody waiting for long, so that the median job, which is short, hardly ever gets idle devices."
        ),
        tables=[
            TextTable(
                "Elastic-Tiresias against Tiresias",
                ("", "nodes", "mean JCT", "", "less", "median", "95th"),
                [_row(variant, *found[variant]) for variant in VARIANTS],
            )
        ],
        plots=[
            Plot(
                name="elastic-tiresias-why",
                title="mean JCT, less than under Tiresias",
                x="row of the table",
                y="percent",
                series=[
                    Series("less", [(float(k), gains[variant]) for k, variant in enumerate(VARIANTS)]),
                ],
                bars=[str(k + 1) for k in range(len(VARIANTS))],
            )
        ],
    )


def _played(
    policy: str,
    jobs: Sequence[TraceJob],
    nodes: int,
    elastic: float,
    variant: Variant,
    throughput: Throughput,
) -> PlaySummary:
    fleet = Fleet.uniform(TYPE, nodes, PER_NODE)
    dressed = with_models(jobs, elastic=elastic, affinity=variant.affinity)
    return summarise(play(fleet, policy, dressed, throughput), fleet)


def _row(variant: Variant, nodes: int, before: PlaySummary, after: PlaySummary) -> tuple[str, ...]:
    return (
        variant.name,
        str(nodes),
        f"{before.mean:,.0f} s",
        f"{after.mean:,.0f} s",
        percent(less(before.mean, after.mean)),
        percent(less(before.median, after.median)),
        percent(less(before.percentile(0.95), after.percentile(0.95))),
    )
