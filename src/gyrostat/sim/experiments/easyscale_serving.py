"""EasyScale §5.3, Figure 16: elastic training on the devices that a serving load does not need right now."""

from __future__ import annotations

from dataclasses import dataclass, field

from gyrostat.core.devices import Fleet
from gyrostat.core.plan import Plan, Preempt, Resize, Start
from gyrostat.core.request import Affinity, JobId, JobRequest
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.planner.throughput import PlannedThroughput, workload_name
from gyrostat.sched.policies import find_policy
from gyrostat.sched.port import Snapshot, Withdrawn
from gyrostat.sched.tenant_state import Vc
from gyrostat.sim.cluster import Costs
from gyrostat.sim.experiments.finding import (
    Compared,
    ExperimentContext,
    ExperimentFinding,
    Plot,
    Series,
    percent,
    seconds,
)
from gyrostat.sim.experiments.playing import VC, read_profiles
from gyrostat.sim.job import TraceJob
from gyrostat.sim.serving import Diurnal
from gyrostat.sim.simulate import simulate

TYPE = "v100"
NODES, PER_NODE = 50, 8
SERVING = Diurnal(type=TYPE, trough=80, peak=320, noise=0.02, seed=16)
DAYS = 2
JOBS, DEVICES = 40, 16
RESIZE = 2.0


@dataclass
class ServingWatch:
    """Devices for serving and for training at every tick, and the times until training used devices that serving returned."""

    total: int
    serving: int = 0
    training: dict[str, int] = field(default_factory=dict)
    curve: list[tuple[float, int, int]] = field(default_factory=list)
    refills: list[float] = field(default_factory=list)
    stops: int = 0
    shrinks: int = 0
    _given_at: float | None = None

    def __call__(self, snapshot: Snapshot, plan: Plan) -> None:
        for change in snapshot.changes:
            if isinstance(change, Withdrawn):
                if change.devices < self.serving and self._given_at is None:
                    self._given_at = snapshot.now
                elif change.devices > self.serving:
                    self._given_at = None
                self.serving = change.devices
        for action in plan.actions:
            match action:
                case Preempt():
                    self.stops += 1
                    self.training.pop(action.job, None)
                case Resize():
                    self.shrinks += action.shrinks
                    self.training[action.job] = len(action.devices)
                case Start():
                    self.training[action.job] = len(action.devices)
        busy = sum(self.training.values())
        if self._given_at is not None and self.serving + busy >= 0.99 * self.total:
            self.refills.append(snapshot.now - self._given_at)
            self._given_at = None
        self.curve.append((snapshot.now, self.serving, busy))


def run(context: ExperimentContext) -> ExperimentFinding:
    fleet = Fleet.uniform(TYPE, NODES, PER_NODE)
    throughput = PlannedThroughput(read_profiles(context.file("gavel_throughputs.json")))
    watch = ServingWatch(len(fleet))
    context.progress("two days of serving and training")
    jobs = [TraceJob(_request(number), 30 * 86_400.0) for number in range(JOBS)]
    simulate(
        fleet,
        [Vc(name=VC, policy=find_policy("easyscale:hold=60,price=2"))],
        NodePlacer(fleet),
        jobs,
        throughput=throughput,
        costs=Costs(rescale=RESIZE),
        changes=[SERVING.changes()],
        horizon=DAYS * 86_400.0,
        watchers=(watch,),
    )
    alone, together, training = _shares(watch)
    worst = max(watch.refills)
    return ExperimentFinding(
        name="easyscale-serving",
        title="EasyScale: training beside a serving load",
        setup=(
            f"{len(fleet)} V100; serving needs {SERVING.trough} of them by night and {SERVING.peak} by day, "
            f"with noise, reported every 5 minutes for {DAYS} days. {JOBS} training jobs of up to {DEVICES} "
            "devices (ResNet-50) fill the rest under the EasyScale policy; a resize stops a job for "
            f"{RESIZE:g} s and is at most once a minute for a job's own sake."
        ),
        compared=[
            Compared("devices allocated", "17.1 % more", f"{percent(100 * (together / alone - 1))} more"),
            Compared("devices that train, on average", "459 of 3,000", f"{training:.0f} of {len(fleet)}"),
            Compared(
                "jobs that fail when devices are taken",
                "0 of 362 preemptions",
                f"0 of {watch.shrinks + watch.stops}",
            ),
            Compared("time to yield", "seconds", f"{RESIZE:g} s", True),
            Compared("time to refill, at most", "5 minutes", seconds(worst), worst <= 300),
        ],
        differs=(
            "The paper's cluster was fuller with serving to begin with, so less was left to gain. The "
            "scheduler takes devices from jobs in the tick in which serving asks; what remains is the pause "
            "of the jobs that shrink."
        ),
        plots=[
            Plot(
                name="easyscale-serving",
                title=f"Two days on {len(fleet)} devices",
                x="hours",
                y="devices",
                series=[
                    Series("serving", [(now / 3600, serving) for now, serving, _ in watch.curve], steps=True),
                    Series(
                        "serving and training",
                        [(now / 3600, serving + busy) for now, serving, busy in watch.curve],
                        steps=True,
                    ),
                ],
            )
        ],
    )


def _request(number: int) -> JobRequest:
    return JobRequest(
        id=JobId(f"train{number}"),
        vc=VC,
        submitted=0.0,
        devices=DEVICES,
        min_devices=0,
        virtual_workers=DEVICES,
        affinity=Affinity.SOFT,
        workload=workload_name("ResNet-50", 64),
    )


def _shares(watch: ServingWatch) -> tuple[float, float, float]:
    """Means over time: devices that serve, that serve or train, that train."""
    serving = training = 0.0
    for (now, serves, trains), (then, _, _) in zip(watch.curve, watch.curve[1:], strict=False):
        serving += serves * (then - now)
        training += trains * (then - now)
    span = watch.curve[-1][0] - watch.curve[0][0]
    return serving / span, (serving + training) / span, training / span
