"""Devices that come for four minutes and are taken away again (EDL §6.2): samples made, as a share of the ideal.

A job has four devices for good, and four more every other four minutes; time is scaled down eight times, so that a pause weighs
eight times as much. The ideal is a job that changes its size in no time: what it would make at the speeds that were
measured on four and on eight devices in the same run. Devices are paced, the model has 25 million parameters.
"""

from __future__ import annotations

import time

from elastic_job import ElasticJob
from figures import Figure, Options, Target, main
from gyrostat.job.processes.start import WorkerForkServer
from pairs import Pair, show_progress
from scale_out_fence import SAMPLES_PER_SECOND

TARGET = Target(at_least=0.97)
WINDOW_S = 240.0 / 8
FEW, MANY = 4, 8
SAMPLES = 8 * 4
"""Of a step."""


def measure(options: Options) -> list[Figure]:
    window = 6.0 if options.quick else WINDOW_S
    pairs = []
    with WorkerForkServer() as parent:
        with ElasticJob(parent, virtual_workers=8, workers=FEW, paced=(SAMPLES_PER_SECOND,)) as job:
            few = job.steady()
            job.scale(MANY)
            many = job.steady()
            job.scale(FEW)
            for number in range(options.pairs):
                began = time.monotonic()
                job.scale(MANY)
                taken_away = began + window
                job.wait_until(taken_away)
                job.scale(FEW)
                job.wait_until(taken_away + window)
                ended = time.monotonic()
                job.wait_for(job.last_step + 2)  # the step that is under way is complete
                made = job.samples(began, ended)
                ideal = SAMPLES * (window / many + (ended - taken_away) / few)
                pairs.append(Pair(made, ideal))
                show_progress(number + 1, options.pairs, f"{made:.4g} of {ideal:.4g} samples")
    return [
        Figure(
            name=f"{MANY - FEW} devices that come and go every {window:.0f} s",
            ours="made",
            theirs="ideal",
            unit="samples",
            pairs=pairs,
            target=TARGET,
        )
    ]


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=4)
