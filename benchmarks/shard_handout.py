"""CPU per shard handed out by the pure queues, with 10⁶ shards: asking for one and reporting it done.

One epoch of 10⁶ shards of 1,000 samples, workers taking turns on a virtual clock. `--quick` takes the first 10⁵ of them.
Measured in CPU time of this process, so that others on the machine hardly matter.
"""

from __future__ import annotations

import time

from figures import Figure, Options, Target, main
from gyrostat.data.shards.layout import ShardLayout
from gyrostat.data.shards.messages import AskShard, Shard, ShardReport
from gyrostat.data.shards.queues import Queues
from pairs import Pair, show_progress

SHARDS = 10**6
SHARD_SIZE = 1000
WORKERS = (1, 64, 1024)
BUDGET_US = 20.0
_QUICK_PAIRS = 3


def measure(options: Options) -> list[Figure]:
    shards = SHARDS // 10 if options.pairs <= _QUICK_PAIRS else SHARDS
    figures = []
    for workers in WORKERS:
        pairs = []
        for pair in range(options.pairs):
            pairs.append(Pair(microseconds_per_shard(workers, shards), BUDGET_US))
            show_progress(pair + 1, options.pairs, f"{workers} workers: {pairs[-1].ours:.2f} µs")
        figures.append(
            Figure(
                name=f"CPU per shard handed out and reported, 10⁶ shards, {workers} workers",
                ours="taken",
                theirs="budget",
                unit="µs",
                pairs=pairs,
                target=Target(at_most=1.0),
            )
        )
    return figures


def microseconds_per_shard(workers: int, shards: int) -> float:
    queues = Queues(ShardLayout.of_indices(SHARDS * SHARD_SIZE, SHARD_SIZE), seed=1)
    names = [f"worker-{number}" for number in range(workers)]
    now, handed_out = 0.0, 0
    began = time.process_time()
    while handed_out < shards:
        for name in names:
            now += 0.001
            shard = queues.ask(AskShard(name, 0), now)
            if isinstance(shard, Shard):
                queues.report(ShardReport(name, 0, ((shard.lease, len(shard)),)), now + 0.001)
        handed_out += workers
    return 1e6 * (time.process_time() - began) / handed_out


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=5)
