"""The order of a dataset of 10⁹ samples, `shuffle="bijection"`: memory that it takes, and seconds until its first micro-batch.

Each measurement is a fresh process that has imported everything. It makes the order of an epoch, asks for a first micro-batch,
then for thousands all over the epoch, on every virtual worker; peak resident memory is compared with what it was before.
A stored permutation of the same order would be 8,000 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from figures import Figure, Options, Target, main
from pairs import Pair, show_progress

SAMPLES = 10**9
VIRTUAL_WORKERS = 8
BATCH_SIZE = 64
BUDGET_MB = 50.0
BUDGET_SECONDS = 1.0


def measure(options: Options) -> list[Figure]:
    memory, start, sample = [], [], []
    for pair in range(options.pairs):
        output = subprocess.run(
            [sys.executable, __file__, "--side"], check=True, capture_output=True, text=True
        ).stdout
        found = json.loads(output)
        memory.append(Pair(found["mb"], BUDGET_MB))
        start.append(Pair(found["first_batch"], BUDGET_SECONDS))
        sample.append(Pair(found["per_sample_us"], 1.0))
        show_progress(pair + 1, options.pairs, f"{found['mb']:.1f} MB, {1000 * found['first_batch']:.1f} ms")
    return [
        Figure(
            name="memory of an order of 10⁹ samples",
            ours="taken",
            theirs="budget",
            unit="MB",
            pairs=memory,
            target=Target(at_most=1.0),
        ),
        Figure(
            name="seconds until the first micro-batch",
            ours="taken",
            theirs="budget",
            unit="s",
            pairs=start,
            target=Target(at_most=1.0),
        ),
        Figure(
            name="CPU per sample of an epoch read in order",
            ours="taken",
            theirs="one microsecond",
            unit="µs",
            pairs=sample,
        ),
    ]


def side() -> None:
    """One measurement, in a process of its own."""
    from gyrostat.data.order import EvenOrder

    def order(length: int) -> EvenOrder:
        return EvenOrder(
            length=length,
            virtual_workers=VIRTUAL_WORKERS,
            batch_size=BATCH_SIZE,
            seed=1,
            epoch=0,
            shuffle="bijection",
        )

    order(1000).indices(0, 0)  # what NumPy sets up once is not the order's
    before = peak_mb()
    began = time.perf_counter()
    billion = order(SAMPLES)
    billion.indices(0, 0)
    first_batch = time.perf_counter() - began
    for batch in range(0, billion.batches, billion.batches // 1000):
        for rank in range(VIRTUAL_WORKERS):
            billion.indices(rank, batch)
    began = time.process_time()
    for batch in range(1000):
        for rank in range(VIRTUAL_WORKERS):
            billion.indices(rank, batch)
    per_sample = (time.process_time() - began) / (1000 * VIRTUAL_WORKERS * BATCH_SIZE)
    print(
        json.dumps({"mb": peak_mb() - before, "first_batch": first_batch, "per_sample_us": 1e6 * per_sample})
    )


def peak_mb() -> float:
    """The largest resident memory of this process so far."""
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1000


if __name__ == "__main__":
    if "--side" in sys.argv:
        side()
    else:
        main(__doc__ or "", measure, pairs=5)
