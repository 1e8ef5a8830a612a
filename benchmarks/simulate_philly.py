"""The whole Philly trace (82,247 jobs) on 73 nodes with 8 devices: Tiresias on one pool, and first in first out in
cells.

Processor seconds of one core for the simulation itself, and peak memory of the process, against what they may be: 60
s and 1 GB. The trace is read from $GYROSTAT_DATA (by default ../shared/data).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Options, Target, main
from pairs import Pair, show_progress

SIDE = Path(__file__).with_name("side_simulate.py")
SECONDS, MEGABYTES = 60.0, 1000.0
JOBS = 82_247


def measure(options: Options) -> Iterator[Figure]:
    trace = Path(os.environ.get("GYROSTAT_DATA", Path(__file__).parents[1] / "../shared/data")) / "philly.csv"
    if not trace.exists():
        sys.exit(f"{trace} is not there: set GYROSTAT_DATA to the directory with the traces")
    for kind, name in (("tiresias", "Tiresias"), ("cells", "cells and first in first out")):
        seconds, memory = [], []
        for pair in range(options.pairs):
            ended = subprocess.run(
                [sys.executable, str(SIDE), str(trace), kind], capture_output=True, text=True, check=True
            )
            found = json.loads(ended.stdout)
            assert found["finished"] == JOBS, found
            seconds.append(Pair(found["seconds"], SECONDS))
            memory.append(Pair(found["megabytes"], MEGABYTES))
            show_progress(pair + 1, options.pairs, f"{found['seconds']:.1f} s, {found['megabytes']:.0f} MB")
        limit = Target(at_most=1.0)
        yield Figure(
            name=f"{name}: time", ours="simulation", theirs="limit", unit="s", pairs=seconds, target=limit
        )
        yield Figure(
            name=f"{name}: memory", ours="peak", theirs="limit", unit="MB", pairs=memory, target=limit
        )


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=1)
