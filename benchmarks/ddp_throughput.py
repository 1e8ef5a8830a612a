"""Throughput of gyrostat on 2 workers with 2 virtual workers, against plain DDP on 2 processes.

Samples per second of the ResNet and the GPT example, one thread per process, both sides alive all the time and taking
turns. Afterwards both must have trained the same bits, which shows that they did the same work.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Options, Target, main
from sides import compare_throughput, ddp_side, gyrostat_side
from workloads import EXAMPLES

RANKS = 2
TARGET = Target(at_least=1.0, low_at_least=0.98)


def measure(options: Options) -> Iterator[Figure]:
    for workload in options.workloads:
        yield compare(workload, options)


def compare(workload: str, options: Options) -> Figure:
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as name:
        directory = Path(name)
        figure = compare_throughput(
            f"gyrostat P={RANKS} N={RANKS} against DDP P={RANKS}",
            gyrostat_side(workload, RANKS, RANKS, directory),
            ddp_side(workload, RANKS, directory),
            options,
            workload=workload,
            batches=RANKS,
            target=TARGET,
        )
        check_same_digest(directory / "gyrostat.json", directory / "ddp.json")
    return figure


def check_same_digest(ours: Path, theirs: Path) -> None:
    digests = [json.loads(path.read_text())["digest"] for path in (ours, theirs)]
    if digests[0] != digests[1]:
        raise SystemExit(f"the sides did not do the same work: digests {digests[0]} and {digests[1]}")
    print(f"both sides ended with the digest {digests[0]}")


if __name__ == "__main__":
    main(__doc__ or "", measure, workloads=EXAMPLES)
