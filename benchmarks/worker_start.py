"""Starting a worker: from the request to its first finished step, forked from the fork server against a cold interpreter.

The fork server has been started before and has imported everything, as it has in a job that grows. The cold interpreter
imports torch and the engine anew. Everything else is the same: launcher, script, two small steps.
"""

from __future__ import annotations

from pathlib import Path

from figures import Figure, Options, Target, main
from gyrostat.core.placement import Placement
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import ColdStart, WorkerForkServer, WorkerSource
from pairs import measure_pairs

SCRIPT = Path(__file__).resolve().parent / "side_start.py"
TARGET = Target(at_most=0.1)


def measure(options: Options) -> list[Figure]:
    request = RunRequest(program=Program(name=str(SCRIPT)), placement=Placement.even(1, 1))
    with WorkerForkServer() as parent, ColdStart() as cold:
        parent.wait_until_ready()
        for source in (parent, cold):  # the first of each finds its files not yet in memory
            first_step(request, source)
        pairs = measure_pairs(
            lambda: first_step(request, parent), lambda: first_step(request, cold), options.pairs
        )
    return [
        Figure(
            name="a worker's start, from the request to its first finished step",
            ours="forked",
            theirs="cold",
            unit="s",
            pairs=pairs,
            target=TARGET,
        )
    ]


def first_step(request: RunRequest, source: WorkerSource) -> float:
    """Run the job; when its first step was complete, in seconds since it was asked for."""
    return run_job(request, parent=source).check().step_times[0]


if __name__ == "__main__":
    main(__doc__ or "", measure)
