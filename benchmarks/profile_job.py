"""A job's profile from 2 to 8 workers: one job that scales in step by step, against a job started anew for each size.

Both sides measure the same number of steps on every size, on the same paced devices, and pay for their start: a fork server
that imports torch. As in EDL §6.2, ten steps on each size.
"""

from __future__ import annotations

import time

from elastic_job import SCRIPT, SMALL, ElasticJob
from figures import Figure, Options, Target, main
from gyrostat.core.job import TrainingOptions
from gyrostat.core.placement import Placement
from gyrostat.job.control.profiling import SETTLING
from gyrostat.job.control.run_request import WorkerOverrides
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import WorkerForkServer
from pairs import measure_pairs

TARGET = Target(at_most=0.25)
SIZES = range(2, 9)
STEPS = 10
VIRTUAL_WORKERS = 8
PACED = (400.0,)
"""Samples per second: a step of eight times 4 samples takes 40 ms on two devices, 10 ms on eight."""


def measure(options: Options) -> list[Figure]:
    return [
        Figure(
            name="profile(2…8)",
            ours="one job",
            theirs="a start for each size",
            unit="s",
            pairs=measure_pairs(one_job, a_job_each, options.pairs),
            target=TARGET,
        )
    ]


def one_job() -> float:
    began = time.perf_counter()
    with WorkerForkServer() as parent:
        job = ElasticJob(parent, virtual_workers=VIRTUAL_WORKERS, workers=max(SIZES), paced=PACED, args=SMALL)
        with job:
            rows = job.job_client.profile(min(SIZES), max(SIZES), STEPS)
            assert [row.workers for row in rows] == list(SIZES)
    return time.perf_counter() - began


def a_job_each() -> float:
    began = time.perf_counter()
    for workers in SIZES:
        with WorkerForkServer() as parent:
            request = RunRequest(
                program=Program(name=str(SCRIPT), args=SMALL),
                placement=Placement.even(VIRTUAL_WORKERS, workers),
                options=TrainingOptions(stop_after=SETTLING + STEPS),
                overrides=WorkerOverrides(paced=PACED),
            )
            run_job(request, parent=parent).check()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=5)
