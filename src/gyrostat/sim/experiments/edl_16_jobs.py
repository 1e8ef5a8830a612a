"""EDL §6.3, Figure 11: a job every 30 seconds until there are 16, on 4 machines with 8 devices; static against elastic."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from gyrostat.core.devices import Fleet
from gyrostat.core.plan import Plan, Preempt
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.planner.throughput import PlannedThroughput, workload_name
from gyrostat.sched.policies import find_policy
from gyrostat.sched.port import Snapshot
from gyrostat.sched.tenant_state import Vc
from gyrostat.sim.experiments.finding import (
    Compared,
    ExperimentContext,
    ExperimentFinding,
    Plot,
    Series,
    TextTable,
    percent,
)
from gyrostat.sim.experiments.playing import VC, read_profiles
from gyrostat.sim.job import TraceJob
from gyrostat.sim.simulate import simulate

TYPE = "v100"
FLEET = f"{TYPE}:4x8"
JOBS, EVERY, DEVICES, PER_DEVICE = 16, 30.0, 4, 4
HORIZON = 900.0
SEED = 11
WORKLOADS = (("ResNet-18", 16), ("ResNet-50", 16), ("Transformer", 16), ("LM", 10))
POLICIES = {"static": "fifo", "elastic": "elastic-tiresias:queues=1,crowd=0,least=0.5"}


@dataclass
class Efficiency:
    """The sum over devices of their efficiency: throughput per device relative to the best a job could have."""

    throughput: PlannedThroughput
    requests: dict[str, JobRequest]
    held: dict[str, int] = field(default_factory=dict)
    cluster: list[tuple[float, float]] = field(default_factory=list)
    per_device: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, snapshot: Snapshot, plan: Plan) -> None:
        for action in plan.actions:
            self.held[action.job] = 0 if isinstance(action, Preempt) else len(action.devices)
        worth = sum(self._worth(self.requests[job], number) for job, number in self.held.items() if number)
        busy = sum(self.held.values())
        self.cluster.append((snapshot.now, worth))
        self.per_device.append((snapshot.now, worth / busy if busy else 0.0))

    def _worth(self, request: JobRequest, devices: int) -> float:
        best = max(
            self.throughput.rate(request, {TYPE: number}) / number
            for number in range(1, PER_DEVICE * DEVICES + 1)
        )
        return self.throughput.rate(request, {TYPE: devices}) / best


def run(context: ExperimentContext) -> ExperimentFinding:
    throughput = PlannedThroughput(read_profiles(context.file("gavel_throughputs.json")))
    found = {name: _play(name, policy, throughput) for name, policy in POLICIES.items()}
    means = {name: _mean(each.cluster) for name, each in found.items()}
    half = JOBS / 2 * EVERY
    early, late = ((0.0, half), (half, HORIZON))
    return ExperimentFinding(
        name="edl-16-jobs",
        title="EDL: 16 jobs on 32 devices, static against elastic",
        setup=(
            "4 machines with 8 V100; a job every 30 s until there are 16, none of which ends within the 15 "
            "minutes that are looked at. Each asks for 4 devices and trains a model drawn evenly from "
            "Gavel's. Static: 4 each, the others wait. Elastic: Elastic-Tiresias with N = 0 and r = 0.5, so "
            "jobs grow while there is room and make room for newcomers, down to 2."
        ),
        compared=[
            Compared(
                "cluster efficiency, elastic over static",
                "higher almost always",
                f"{percent(100 * (means['elastic'] / means['static'] - 1))} higher on average",
                means["elastic"] > means["static"],
            ),
            Compared("per device, first half", "lower than static", _versus(found, early)),
            Compared(
                "per device, second half", "higher than static", _versus(found, late), _higher(found, late)
            ),
        ],
        differs=(
            "The paper shows curves and no numbers; theirs have small spikes while jobs are resized, "
            "which costs nothing here."
        ),
        tables=[
            TextTable(
                "Efficiency",
                ("", "cluster, mean of 32", "per device, first half", "per device, second half"),
                [
                    (
                        name,
                        f"{means[name]:.1f}",
                        f"{_mean(each.per_device, *early):.2f}",
                        f"{_mean(each.per_device, *late):.2f}",
                    )
                    for name, each in found.items()
                ],
            )
        ],
        plots=[
            Plot(
                name="edl-16-jobs",
                title="Cluster efficiency: a job every 30 s, then 16",
                x="seconds",
                y="sum of the devices' efficiency",
                series=[Series(name, each.cluster, steps=True) for name, each in found.items()],
            )
        ],
    )


def _play(name: str, policy: str, throughput: PlannedThroughput) -> Efficiency:
    draw = random.Random(SEED)
    jobs = [_job(number, *draw.choice(WORKLOADS), elastic=name == "elastic") for number in range(JOBS)]
    efficiency = Efficiency(throughput, {job.request.id: job.request for job in jobs})
    fleet = Fleet.parse(FLEET)
    simulate(
        fleet,
        [Vc(name=VC, policy=find_policy(policy))],
        NodePlacer(fleet),
        jobs,
        throughput=throughput,
        horizon=HORIZON,
        watchers=(efficiency,),
    )
    return efficiency


def _job(number: int, profile: str, batch: int, *, elastic: bool) -> TraceJob:
    request = JobRequest(
        id=JobId(f"job{number}"),
        vc=VC,
        submitted=number * EVERY,
        devices=DEVICES,
        min_devices=1 if elastic else None,
        max_devices=2 * DEVICES if elastic else None,
        virtual_workers=PER_DEVICE * DEVICES,
        workload=workload_name(profile, batch),
    )
    return TraceJob(request, 86_400.0)


def _mean(curve: list[tuple[float, float]], since: float = 0.0, until: float = HORIZON) -> float:
    """Over time, of a step function."""
    total = 0.0
    for (now, value), (then, _) in zip(curve, [*curve[1:], (HORIZON, 0.0)], strict=True):
        total += value * max(0.0, min(then, until) - max(now, since))
    return total / (until - since)


def _higher(found: dict[str, Efficiency], span: tuple[float, float]) -> bool:
    return _mean(found["elastic"].per_device, *span) > _mean(found["static"].per_device, *span)


def _versus(found: dict[str, Efficiency], span: tuple[float, float]) -> str:
    elastic, static = (_mean(found[name].per_device, *span) for name in ("elastic", "static"))
    return f"{elastic:.2f} against {static:.2f}"
