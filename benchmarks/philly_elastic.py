"""How long the whole Philly trace takes to simulate under Elastic-Tiresias: 82,247 jobs, CPU seconds of one core.

The cluster is that of `gyrostat experiment elastic-tiresias`. The trace is read from `GYROSTAT_DATA`
(see docs/howto/experiments.md).
With `--quick` only its first 5,000 jobs, on a cluster that is as busy with them; the limit is then in proportion.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Options, Target, main
from gyrostat.core.devices import Fleet
from gyrostat.sched.planner.throughput import PlannedThroughput
from gyrostat.sim.experiments.elastic_tiresias import NODES, PER_NODE, POLICIES, TYPE, philly_jobs
from gyrostat.sim.experiments.playing import play, read_profiles
from pairs import Pair

LIMIT_S, JOBS = 120.0, 82_247
QUICK_JOBS, QUICK_NODES = 5_000, 20
DATA = Path(os.environ.get("GYROSTAT_DATA", "data"))


def measure(options: Options) -> Iterator[Figure]:
    jobs, nodes = (QUICK_JOBS, QUICK_NODES) if options.quick else (JOBS, NODES)
    limit = LIMIT_S * jobs / JOBS
    yield Figure(
        name=f"{jobs:,} jobs of Philly on {nodes * PER_NODE} devices",
        ours="simulation",
        theirs="limit",
        unit="s",
        pairs=[Pair(seconds(jobs, nodes), limit) for _ in range(options.pairs)],
        target=Target(at_most=1.0),
    )


def seconds(number: int, nodes: int) -> float:
    """CPU time of one simulation, without reading the trace."""
    throughput = PlannedThroughput(read_profiles(DATA / "gavel_throughputs.json"))
    jobs = list(philly_jobs(DATA / "philly.csv", elastic=True, most=number))
    began = time.process_time()
    result = play(Fleet.uniform(TYPE, nodes, PER_NODE), POLICIES["Elastic-Tiresias"], jobs, throughput)
    assert not result.unfinished
    return time.process_time() - began


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=1)
