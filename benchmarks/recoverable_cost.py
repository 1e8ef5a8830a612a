"""What it costs to be able to lose a worker: throughput with backups of all contexts (`--recovery peers`) against without.

The examples on 2 workers that compute, 2 and 8 virtual workers. Both sides are the same job, but for that option.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Options, Target, main
from sides import compare_throughput, gyrostat_side
from workloads import BATCH_SIZES

TARGET = Target(at_least=0.99)


def measure(options: Options) -> Iterator[Figure]:
    for workload in options.workloads:
        for virtual_workers in (2, 8):
            with tempfile.TemporaryDirectory() as directory:
                ours, theirs = (
                    gyrostat_side(
                        workload,
                        virtual_workers,
                        2,
                        Path(directory),
                        name=name,
                        more=("--recovery", recovery),
                    )
                    for name, recovery in (("recoverable", "peers"), ("not", "checkpoint"))
                )
                yield compare_throughput(
                    f"{virtual_workers} virtual workers, with backups against without",
                    ours,
                    theirs,
                    options,
                    workload=workload,
                    batches=virtual_workers,
                    target=TARGET,
                )


if __name__ == "__main__":
    main(__doc__ or "", measure, workloads=tuple(BATCH_SIZES))
