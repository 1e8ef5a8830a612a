"""Tiresias' order of jobs, equal to the second with its public simulator, but for a fault that `listed_tiresias` describes."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Sequence

import pytest

from gyrostat.core.devices import Fleet
from gyrostat.core.request import Affinity, JobId, JobRequest
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.policies import find_policy
from gyrostat.sched.tenant_state import Vc
from gyrostat.sim.job import TraceJob
from gyrostat.sim.simulate import simulate
from gyrostat.sim.traces import read_trace
from tests.sched.policies.listed_tiresias import ListedJob, run_listed
from tests.sim.data import data

CLUSTERS = {"n1g8": 8, "n2g8": 16}


def recorded(name: str) -> list[dict[str, str]]:
    with data(f"peers/tiresias/{name}.csv").open() as file:
        return list(csv.DictReader(file))


def sixty_jobs() -> list[ListedJob]:
    return [
        ListedJob(
            id=row["job_id"],
            devices=int(row["num_gpu"]),
            submitted=float(row["submit_time"]),
            duration=float(row["duration"]),
        )
        for row in recorded("60_job")
    ]


def philly() -> list[ListedJob]:
    """One in 32 jobs of the trace, on 8 devices: overloaded."""
    return [
        ListedJob(
            id=job.request.id,
            devices=job.request.devices,
            submitted=job.request.submitted,
            duration=job.duration,
        )
        for job in read_trace(data("philly.csv"))[::32]
        if job.request.devices <= 8
    ]


def drawn(seed: int) -> list[ListedJob]:
    """Jobs of whole seconds, many of one instant, so that ties matter."""
    draw = random.Random(seed)
    return [
        ListedJob(
            id=f"j{number}",
            devices=draw.choice((1, 1, 1, 2, 3, 4, 8)),
            submitted=float(draw.randrange(0, 400, 10)),
            duration=float(draw.randrange(1, 200)),
        )
        for number in range(40)
    ]


def ours(jobs: Sequence[ListedJob], devices: int, policy: str) -> dict[str, tuple[float, int]]:
    """When each job finishes under our policy, and how often it is preempted, with devices counted without locality."""
    fleet = Fleet.parse(f"gpu:1x{devices}")
    trace = [
        TraceJob(
            JobRequest(
                id=JobId(job.id),
                vc="all",
                submitted=job.submitted,
                devices=job.devices,
                affinity=Affinity.SOFT,
            ),
            job.duration,
        )
        for job in sorted(jobs, key=lambda job: job.submitted)
    ]
    vcs = [Vc(name="all", policy=find_policy(policy))]
    records = simulate(fleet, vcs, NodePlacer(fleet), trace).records
    times = zip(records.finished, records.preemptions, strict=True)
    return dict(zip(map(str, records.ids), times, strict=True))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("threshold", [150, 500, 3250])
def test_the_lists_are_the_public_simulator(threshold: int, cluster: str) -> None:
    """With its fault, every job's completion time and preemptions are as recorded."""
    found = run_listed(sixty_jobs(), devices=CLUSTERS[cluster], thresholds=[threshold, 7200], late=True)
    rows = recorded(f"dlas-gpu-{threshold}-{cluster}")
    assert len(rows) == 60
    assert {row["job_id"]: (float(row["end_time"]), int(row["preempt"])) for row in rows} == {
        job.id: (job.finished, job.preemptions) for job in found.values()
    }


JOBS: dict[str, tuple[Callable[[], list[ListedJob]], int, tuple[int, ...]]] = {
    **{f"60 jobs, {limit}": (sixty_jobs, 8, (limit, 7200)) for limit in (150, 500, 3250)},
    **{f"60 jobs, {limit}, 16 devices": (sixty_jobs, 16, (limit, 7200)) for limit in (150, 500, 3250)},
    **{f"drawn {seed}": (lambda seed=seed: drawn(seed), 8, (48, 240)) for seed in range(20)},  # type: ignore[misc]
    "Philly": (philly, 8, (500, 10_000)),
}


@pytest.mark.parametrize("yields", [True, False])
@pytest.mark.parametrize("jobs", JOBS)
def test_our_order_is_that_of_the_lists(jobs: str, yields: bool) -> None:
    """Without the fault, our policy finishes every job when the lists do, to the second."""
    make, devices, thresholds = JOBS[jobs]
    expected = run_listed(make(), devices=devices, thresholds=thresholds, yields=yields)
    queues = "/".join(map(str, thresholds))
    found = ours(make(), devices, f"tiresias:queues={queues},order={'simulator' if yields else 'running'}")
    differing = {
        id_: (found[id_], (job.finished, job.preemptions))
        for id_, job in expected.items()
        if abs(found[id_][0] - job.finished) > 0.5 or found[id_][1] != job.preemptions
    }
    assert not differing
