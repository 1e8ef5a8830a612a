"""One tick with 1,000 running and 5,000 waiting jobs on 10,000 devices, against the 100 ms that it may take.

The jobs are there, all devices are in use, and something happens: a job ends and one is submitted. Processor time of
the tick. For policies that preempt, a threshold is also reached. Elastic policies: `elastic_tick.py`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from figures import Figure, Options, Target, main
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.port import Finished, Snapshot, Submitted
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tick import tick
from gyrostat.sim.setup import Setup
from pairs import Pair, show_progress

LIMIT_MS = 100.0
RUNNING, WAITING, NODES = 1_000, 5_000, 1_250
SETUPS = {
    "first in first out, one pool": ("fifo", "flat"),
    "with backfill, one pool": ("fifo:backfill=yes", "flat"),
    "Tiresias, one pool": ("tiresias", "flat"),
    "Gittins, one pool": ("gittins", "flat"),
    "priority with preemption, one pool": ("priority:preempt=yes", "flat"),
    "Gandiva, one pool": ("gandiva", "flat"),
    "first in first out, cells": ("fifo", "cells"),
    "Tiresias, cells": ("tiresias", "cells"),
}


class Scene:
    """A full cluster with a long queue."""

    def __init__(self, policy: str, sharing: str) -> None:
        self.vcs = ["all"] if sharing == "flat" else [f"t{k}" for k in range(10)]
        nodes = None if sharing == "flat" else dict.fromkeys(self.vcs, NODES // 10)
        setup = Setup(cluster=f"gpu:{NODES}x8", nodes=nodes, sharing=sharing, policy=policy)
        self.scheduler_state: SchedulerState = setup.scheduler_state()
        self.draw = random.Random(1)
        self.now, self.number = 0.0, 0
        tick(
            self.scheduler_state,
            Snapshot(0.0, tuple(Submitted(self.job(devices=10)) for _ in range(RUNNING))),
        )
        self.now = 1000.0
        tick(self.scheduler_state, Snapshot(self.now, tuple(Submitted(self.job()) for _ in range(WAITING))))

    def job(self, devices: int = 0) -> JobRequest:
        self.number += 1
        return JobRequest(
            id=JobId(str(self.number)),
            vc=self.vcs[self.number % len(self.vcs)],
            submitted=self.now,
            devices=devices or self.draw.choice((1, 2, 4, 8, 16)),
            priority=self.draw.randrange(5),
        )

    def milliseconds(self) -> float:
        """Of one tick, in which a job ends and another comes."""
        self.now += 100.0
        running = [job.id for job in self.scheduler_state.jobs.values() if job.running]
        changes = (Finished(self.draw.choice(running)), Submitted(self.job()))
        began = time.process_time()
        tick(self.scheduler_state, Snapshot(self.now, changes))
        return 1000 * (time.process_time() - began)


def measure(options: Options) -> Iterator[Figure]:
    for name, (policy, sharing) in SETUPS.items():
        scene = Scene(policy, sharing)
        pairs = [Pair(scene.milliseconds(), LIMIT_MS) for _ in range(options.pairs)]
        show_progress(1, 1, f"{name}: {max(pair.ours for pair in pairs):.1f} ms at most")
        yield Figure(
            name=f"{name}: {RUNNING} running, {WAITING} waiting, {8 * NODES} devices",
            ours="tick",
            theirs="limit",
            unit="ms",
            pairs=pairs,
            target=Target(at_most=1.0),
        )


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=50)
