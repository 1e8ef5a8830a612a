"""A worker that falls silent (SIGSTOP): how long until the next step is complete, beyond the time-out and a step.

4 paced workers, `--heartbeat-timeout 2`. The stopped one is found when the timeout expires; then recovery is that of a killed
worker. After SIGCONT it is refused. The limit is 200 ms.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

from figures import Figure, Options, main
from gyrostat.job.processes.start import WorkerForkServer
from pairs import Pair, show_progress
from recovery import ALLOWED_S, PACED, WITHIN, Mortal

SILENCE_S = 2.0
WORKERS, VIRTUAL_WORKERS = 4, 8


def measure(options: Options) -> Iterator[Figure]:
    beyond = []
    with WorkerForkServer() as parent:
        with Mortal(parent, WORKERS - 1, VIRTUAL_WORKERS, PACED) as left:
            step_s = left.steady(20)
        with Mortal(parent, WORKERS, VIRTUAL_WORKERS, PACED, heartbeat_timeout_s=SILENCE_S) as job:
            for number in range(options.pairs):
                gap = job.hit_one(signal.SIGSTOP)
                beyond.append(max(0.0, gap - SILENCE_S - step_s))
                show_progress(number + 1, options.pairs, f"{1e3 * gap:.0f} ms, {1e3 * beyond[-1]:.0f} beyond")
                job.wake()
    yield Figure(
        name=f"one of {WORKERS} workers stopped, paced",
        ours="beyond the time-out",
        theirs="allowed",
        unit="s",
        pairs=[Pair(seconds, ALLOWED_S) for seconds in beyond],
        target=WITHIN,
    )


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=5)
