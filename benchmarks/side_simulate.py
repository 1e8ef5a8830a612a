"""One simulation of the whole Philly trace in a process of its own; prints processor seconds and peak memory as JSON.

python benchmarks/side_simulate.py TRACE tiresias|cells
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from gyrostat.sim.setup import Setup, by_load, for_setup
from gyrostat.sim.simulate import simulate
from gyrostat.sim.traces import read_trace

NODES = 73


def main() -> None:
    jobs = read_trace(Path(sys.argv[1]))
    if sys.argv[2] == "tiresias":
        setup = Setup(cluster=f"gpu:{NODES}x8", sharing="flat", policy="tiresias")
    else:
        setup = Setup(cluster="by-load", nodes=by_load(jobs, NODES), sharing="cells", policy="fifo")
    fleet, vcs, placer = setup.parts()
    prepared = for_setup(setup, jobs)
    began = time.process_time()
    result = simulate(fleet, vcs, placer, prepared)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    finished = len(result.records)
    print(json.dumps({"seconds": seconds, "megabytes": peak, "events": result.events, "finished": finished}))


if __name__ == "__main__":
    main()
