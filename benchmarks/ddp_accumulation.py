"""Eight virtual workers on two workers, against plain DDP on two processes that accumulates four micro-batches each.

Samples per second of the ResNet and the GPT example, one thread per process, both sides taking turns, for both orders of
reduction. DDP skips the reduction of all but the last micro-batch (`no_sync`), as its documentation advises. The sides
train different bits: to DDP these are two ranks, to gyrostat eight.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import REDUCTIONS, Figure, Options, Target, main
from sides import compare_throughput, ddp_side, gyrostat_side
from workloads import EXAMPLES

VIRTUAL_WORKERS = 8
WORKERS = 2
TARGET = Target(at_least=0.97)


def measure(options: Options) -> Iterator[Figure]:
    for workload in options.workloads:
        for reduction in options.reductions:
            yield compare(workload, reduction, options)


def compare(workload: str, reduction: str, options: Options) -> Figure:
    micro_batches = VIRTUAL_WORKERS // WORKERS
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as name:
        directory = Path(name)
        return compare_throughput(
            f"gyrostat P={WORKERS} N={VIRTUAL_WORKERS}, {reduction} order, "
            f"against DDP P={WORKERS} with {micro_batches} accumulation steps",
            gyrostat_side(workload, VIRTUAL_WORKERS, WORKERS, directory, reduction=reduction),
            ddp_side(workload, WORKERS, directory, micro_batches=micro_batches),
            options,
            workload=workload,
            batches=VIRTUAL_WORKERS,
            target=TARGET,
        )


if __name__ == "__main__":
    main(__doc__ or "", measure, workloads=EXAMPLES, reductions=REDUCTIONS)
