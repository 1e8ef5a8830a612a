"""First in, first out, with capacity queues: YARN's capacity scheduler with gangs, as HiveD compares with (§5.1).

Each VC is a queue with a guaranteed capacity. A job gets all its devices at once or waits. The first job that does not fit
blocks the later ones, unless `backfill` is on. Jobs that do not fit into the guarantee may borrow devices.
"""

from __future__ import annotations

import math

from gyrostat.sched.policy import BORROWS, Policy, PolicyActions, run_by_rank
from gyrostat.sched.views import JobView, Key, VcView


class Fifo(Policy):
    def __init__(self, *, backfill: bool = False) -> None:
        self.backfill = backfill

    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        return (job.request.submitted,), math.inf

    def decide(self, view: VcView, now: float) -> PolicyActions:
        return run_by_rank(view, "next in line", backfill=self.backfill)

    def borrow(self, view: VcView, now: float) -> PolicyActions:
        return run_by_rank(view, BORROWS, borrowed=True, backfill=self.backfill)
