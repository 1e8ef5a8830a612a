"""Static priority: the highest priority first, then the order of submission.

By default running jobs are not preempted, as in most clusters, and the first job that does not fit blocks the others; with
`preempt` a job may preempt jobs of lower priority.
"""

from __future__ import annotations

import math

from gyrostat.sched.policies.preemptive import by_rank
from gyrostat.sched.policy import Policy, PolicyActions, run
from gyrostat.sched.views import JobView, Key, VcView


class StaticPriority(Policy):
    def __init__(self, *, preempt: bool = False) -> None:
        self.preempt = preempt

    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        return (-job.request.priority, job.request.submitted), math.inf

    def decide(self, view: VcView, now: float) -> PolicyActions:
        if self.preempt:
            yield from by_rank(view, _why)
            return
        while (job := view.next()) is not None:
            if not (yield from run(view, job, _why(job))):
                return


def _why(job: JobView) -> str:
    return f"priority {job.request.priority}"
