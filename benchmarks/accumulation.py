"""Eight virtual workers on one worker, against a gradient-accumulation loop of eight micro-batches written by hand.

Samples per second of the ResNet and the GPT example, one thread, two processes that take turns, for both orders of
reduction. The loop gives up what virtual workers keep (random streams, batch-norm statistics and the order of additions
of eight DDP ranks), so this is the price of exactness.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import REDUCTIONS, Figure, Options, Target, main
from sides import compare_throughput, gyrostat_side, loop_side
from workloads import EXAMPLES

VIRTUAL_WORKERS = 8
TARGET = Target(at_least=0.98)


def measure(options: Options) -> Iterator[Figure]:
    for workload in options.workloads:
        for reduction in options.reductions:
            yield compare(workload, reduction, options)


def compare(workload: str, reduction: str, options: Options) -> Figure:
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as name:
        directory = Path(name)
        return compare_throughput(
            f"gyrostat P=1 N={VIRTUAL_WORKERS}, {reduction} order, against accumulation by hand",
            gyrostat_side(workload, VIRTUAL_WORKERS, 1, directory, reduction=reduction),
            loop_side(workload, directory, micro_batches=VIRTUAL_WORKERS),
            options,
            workload=workload,
            batches=VIRTUAL_WORKERS,
            target=TARGET,
        )


if __name__ == "__main__":
    main(__doc__ or "", measure, workloads=EXAMPLES, reductions=REDUCTIONS)
