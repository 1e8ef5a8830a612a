"""Eight virtual workers on one worker, against a gradient-accumulation loop of eight micro-batches written by hand.

Samples per second of the ResNet and the GPT example, one thread, two processes that take turns. The loop gives up what
virtual workers keep (random streams, batch-norm statistics and the order of additions of eight DDP ranks), so this is
the price of exactness.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddp_throughput import HERE, ONE_THREAD, gyrostat_side
from figures import Figure, Options, Target, main
from pairs import Pair
from turns import Side, take_turns
from workloads import BATCH_SIZES

VIRTUAL_WORKERS = 8
TARGET = Target(at_least=0.97)


def measure(options: Options) -> Iterator[Figure]:
    for workload in options.workloads:
        yield compare(workload, options)


def compare(workload: str, options: Options) -> Figure:
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as name:
        directory = Path(name)
        with (
            gyrostat_side(workload, VIRTUAL_WORKERS, 1, directory) as ours,
            loop_side(workload, directory) as theirs,
        ):
            turns = take_turns(ours, theirs, pairs=options.pairs, block_seconds=options.block_seconds)
    samples = BATCH_SIZES[workload] * VIRTUAL_WORKERS
    return Figure(
        name=f"{workload}: gyrostat P=1 N={VIRTUAL_WORKERS} against accumulation by hand",
        ours="gyrostat",
        theirs="loop",
        unit="samples/s",
        pairs=[Pair(pair.ours * samples, pair.theirs * samples) for pair in turns],
        target=TARGET,
    )


def loop_side(workload: str, directory: Path) -> Side:
    command = [sys.executable, str(HERE / "side_accumulation.py"), workload]
    command += ["--micro-batches", str(VIRTUAL_WORKERS)]
    return Side("loop", [command], address=directory / "loop.socket", processes=1, env=ONE_THREAD)


if __name__ == "__main__":
    main(__doc__ or "", measure, workloads=list(BATCH_SIZES))
