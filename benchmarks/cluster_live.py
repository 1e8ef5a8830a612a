"""VirtualFlow's 20 jobs (§6.4.2) live on one machine: elastic fair shares against static priority; and against the simulator.

The released trace runs on a real cluster of 16 paced slots, with real hosts, workers, fences and checkpoints. Time is 25 times
as fast, and every job has 1.37 times its work, because the raw trace is a lighter load than the paper's (nobody queues; see
docs/results.md); the factor was chosen by what the simulator gains with it, which is most at 1.36 to 1.38.
A job's step takes 0.2 s on the devices that it asked for, but a micro-batch no less than 0.05 s, for two real cores compute for
16 slots: with N virtual workers on p devices it takes ceil(N / p) times as long as a micro-batch, which is what the simulator
expects, too. The simulator is given the same jobs, and what a start cost live in the median.
`--quick` runs the first six jobs, 200 times as fast. $GYROSTAT_DATA is the directory of traces.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from figures import Figure, Options, Target, main
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import JobRecord, JobState
from gyrostat.core.devices import Fleet
from gyrostat.local.daemon import Daemon
from gyrostat.local.home import Home
from gyrostat.local.layout import layout_of_slots
from gyrostat.sched.throughput import AnalyticScaling
from gyrostat.sim.cluster import Costs
from gyrostat.sim.experiments.finding import ExperimentContext
from gyrostat.sim.experiments.playing import PlaySummary, play, summarise
from gyrostat.sim.experiments.virtualflow_traces import VirtualFlowTrace
from gyrostat.sim.job import TraceJob
from pairs import Pair, show_progress

DATA = "GYROSTAT_DATA"
DEVICES = 16
FASTER, STRETCH = 25.0, 1.37
STEP_S, SHORTEST_MICRO_BATCH_S = 0.2, 0.05
PACE = 100.0
"""Samples per second, of every slot."""
POLICIES = {False: "priority", True: "wfs"}
SCRIPT = """
import sys
import torch
import gyrostat

job = gyrostat.init(seed=1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(4096, 4), torch.randint(2, (4096,)))
loader = job.dataloader(data, batch_size=int(sys.argv[2]), shuffle=True)
job.track(model=model, optimizer=optimizer)
while job.step < int(sys.argv[1]):
    for step in job.steps(loader, limit=int(sys.argv[1]) - job.step):
        for x, y in step:
            step.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Live:
    """What became of the jobs, in seconds."""

    jct: Sequence[float]
    queueing: Sequence[float]
    starts: Sequence[float]
    """From devices to training, of every first start."""
    makespan: float


def measure(options: Options) -> list[Figure]:
    data = Path(os.environ.get(DATA, "/work/shared/data"))
    faster = 200.0 if options.quick else FASTER
    number = 6 if options.quick else 20
    lived: dict[bool, list[Live]] = {False: [], True: []}
    simulated: dict[bool, list[PlaySummary]] = {False: [], True: []}
    for turn in range(options.pairs):
        for elastic in POLICIES:
            jobs = [scaled(job, faster) for job in trace(data, elastic)[:number]]
            lived[elastic].append(live(jobs, elastic))
            start = statistics.median(lived[elastic][-1].starts)
            simulated[elastic].append(simulate(jobs, elastic, start))
            show_progress(
                2 * turn + elastic + 1,
                2 * options.pairs,
                f"{POLICIES[elastic]}: makespan {lived[elastic][-1].makespan:.1f} s, simulated "
                f"{simulated[elastic][-1].makespan:.1f} s; a start takes {start:.2f} s",
            )
    return [*elastic_against_static(lived), *live_against_simulated(lived, simulated)]


def trace(data: Path, elastic: bool) -> list[TraceJob]:
    return list(
        VirtualFlowTrace(ExperimentContext(data=data), "jobs20.json").jobs(elastic=elastic, stretch=STRETCH)
    )


def scaled(job: TraceJob, faster: float) -> TraceJob:
    """Its work as whole steps of paced micro-batches, and its times so much shorter."""
    request = job.request
    largest = None if request.max_devices is None else min(DEVICES, request.max_devices)
    request = replace(
        request, submitted=request.submitted / faster, max_devices=largest, types=(), workload=None
    )
    step = step_seconds(job)
    return TraceJob(request, max(1, round(job.duration / faster / step)) * step)


def micro_batches(job: TraceJob) -> int:
    """One after the other in a step, on the devices that were asked for."""
    workers = job.request.virtual_workers
    assert workers is not None
    return -(-workers // job.request.devices)


def batch_size(job: TraceJob) -> int:
    """So many samples that a micro-batch takes as long as it should."""
    return round(max(STEP_S / micro_batches(job), SHORTEST_MICRO_BATCH_S) * PACE)


def step_seconds(job: TraceJob) -> float:
    """On the devices that were asked for."""
    return micro_batches(job) * batch_size(job) / PACE


def live(jobs: Sequence[TraceJob], elastic: bool) -> Live:
    with tempfile.TemporaryDirectory(prefix="gyrostat-live-") as directory:
        (Path(directory) / "train.py").write_text(SCRIPT)
        layout = layout_of_slots(f"cpu:{DEVICES}@{PACE}")
        with Daemon(Home(Path(directory) / "state"), layout, POLICIES[elastic], spare=3) as daemon:
            daemon.await_ready(120.0)
            began = time.monotonic()
            for job in jobs:
                daemon.wait(max(0.0, job.request.submitted - (time.monotonic() - began)))
                daemon.service.submit(spec_of(job, directory), "bench")
            while not all(record.state.over for record in daemon.service.jobs(None)):
                daemon.wait(0.2)
            records = daemon.service.jobs(None)
            starts = [first_start(daemon, record) for record in records]
            daemon.service.shutdown()
    failed = [record for record in records if record.state is not JobState.FINISHED]
    if failed:
        raise SystemExit(f"{failed[0].id} is {failed[0].state}: {failed[0].reason}")
    ends = [record.finished or 0.0 for record in records]
    return Live(
        jct=[end - record.submitted for end, record in zip(ends, records, strict=True)],
        queueing=[(record.started or 0.0) - record.submitted for record in records],
        starts=starts,
        makespan=max(ends) - min(record.submitted for record in records),
    )


def spec_of(job: TraceJob, directory: str) -> JobSpec:
    request = job.request
    assert request.virtual_workers is not None
    return JobSpec(
        script="train.py",
        args=(str(round(job.duration / step_seconds(job))), str(batch_size(job))),
        workdir=directory,
        name=str(request.id),
        virtual_workers=request.virtual_workers,
        min=request.smallest,
        max=request.largest,
        priority=request.priority,
    )


def first_start(daemon: Daemon, record: JobRecord) -> float:
    events = [event for event in daemon.service.events(None) if event.job == record.id]
    got = next(event.at for event in events if event.kind == "started")
    return next(event.at for event in events if event.kind == "running") - got


def simulate(jobs: Sequence[TraceJob], elastic: bool, start: float) -> PlaySummary:
    fleet = Fleet.parse(f"cpu:1x{DEVICES}")
    result = play(fleet, POLICIES[elastic], jobs, AnalyticScaling(), costs=Costs(start=start))
    return summarise(result, fleet)


def elastic_against_static(lived: dict[bool, list[Live]]) -> list[Figure]:
    def figure(name: str, most: float, values: dict[bool, list[float]]) -> Figure:
        pairs = [
            Pair(ours, max(theirs, 1e-9)) for ours, theirs in zip(values[True], values[False], strict=True)
        ]
        return Figure(
            name=f"{name}, live",
            ours="elastic",
            theirs="static",
            unit="s",
            pairs=pairs,
            target=Target(at_most=most),
        )

    return [
        figure("makespan", 0.6, {side: [run.makespan for run in runs] for side, runs in lived.items()}),
        figure(
            "median JCT",
            0.55,
            {side: [statistics.median(run.jct) for run in runs] for side, runs in lived.items()},
        ),
        figure(
            "median queueing",
            0.05,
            {side: [statistics.median(run.queueing) for run in runs] for side, runs in lived.items()},
        ),
    ]


def live_against_simulated(
    lived: dict[bool, list[Live]], simulated: dict[bool, list[PlaySummary]]
) -> list[Figure]:
    figures = []
    for elastic, policy in POLICIES.items():
        both = list(zip(simulated[elastic], lived[elastic], strict=True))
        for name, pairs in (
            ("makespan", [Pair(sim.makespan, real.makespan) for sim, real in both]),
            ("mean JCT", [Pair(sim.mean, statistics.fmean(real.jct)) for sim, real in both]),
        ):
            figures.append(
                Figure(
                    name=f"{name} under {policy}",
                    ours="simulated",
                    theirs="live",
                    unit="s",
                    pairs=pairs,
                    target=Target(at_least=0.9, at_most=1.1),
                )
            )
    return figures


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=1)
