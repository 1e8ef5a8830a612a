"""A scale-in: by how much the step after it takes longer than those that follow, as a share of such a step.

25 million parameters with momentum; from 2 workers to 1 everything computes, from 8 to 4 devices are paced.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic_job import ElasticJob
from figures import Figure, Options, Target, main
from gyrostat.job.processes.start import WorkerForkServer
from pairs import Pair, show_progress
from scale_out_fence import SAMPLES_PER_SECOND

TARGET = Target(at_most=0.2)


def measure(options: Options) -> Iterator[Figure]:
    for many, few, paced in ((2, 1, ()), (8, 4, (SAMPLES_PER_SECOND,))):
        pairs = []
        with WorkerForkServer() as parent:
            with ElasticJob(parent, virtual_workers=8 if paced else 2, workers=many, paced=paced) as job:
                for number in range(options.pairs):
                    job.scale(many)
                    cost = job.scale(few)
                    pairs.append(Pair(max(0.0, cost.blocked), cost.step))
                    show_progress(number + 1, options.pairs, f"{cost.blocked:.4g} of {cost.step:.4g} s")
        yield Figure(
            name=f"{many} to {few} workers{', paced' if paced else ''}: the gap",
            ours="gap",
            theirs="a step",
            unit="s",
            pairs=pairs,
            target=TARGET,
        )


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=10)
