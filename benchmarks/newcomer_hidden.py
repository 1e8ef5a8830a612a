"""A newcomer, from the request until the first step with it is complete: which share of that time training went on.

25 million parameters with momentum; from 1 worker to 2 everything computes, from 4 to 8 devices are paced.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic_job import ElasticJob
from figures import Figure, Options, Target, main
from gyrostat.job.processes.start import WorkerForkServer
from pairs import Pair, show_progress
from scale_out_fence import SAMPLES_PER_SECOND

TARGET = Target(at_least=0.95)


def measure(options: Options) -> Iterator[Figure]:
    for few, many, paced in ((1, 2, ()), (4, 8, (SAMPLES_PER_SECOND,))):
        pairs = []
        with WorkerForkServer() as parent:
            with ElasticJob(parent, virtual_workers=8 if paced else 2, workers=few, paced=paced) as job:
                for number in range(options.pairs):
                    job.scale(few)
                    cost = job.scale(many)
                    hidden = cost.to_first_step - max(0.0, cost.blocked)
                    pairs.append(Pair(hidden, cost.to_first_step))
                    show_progress(number + 1, options.pairs, f"{hidden:.4g} of {cost.to_first_step:.4g} s")
        yield Figure(
            name=f"{few} to {many} workers{', paced' if paced else ''}: from the request to the first step, hidden",
            ours="training went on for",
            theirs="of",
            unit="s",
            pairs=pairs,
            target=TARGET,
            percent=True,
        )


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=10)
