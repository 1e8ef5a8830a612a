"""Optimus (Peng et al., EuroSys 2018): devices go to the jobs whose remaining time they reduce most.

Every `interval` all devices are allocated again: one to each job in order of arrival, so that none starves; then one at a
time to the job whose estimated remaining time decreases most. Remaining time is remaining work over expected throughput; a
job of unknown work is expected to be half done. A job stays on one device type.
"""

from __future__ import annotations

import heapq
import math

from gyrostat.core.devices import Counts
from gyrostat.core.request import JobId
from gyrostat.sched.policies.proposals import grow_borrowed
from gyrostat.sched.policies.steady import DeviceTargets, SteadyPolicy, limit
from gyrostat.sched.policy import Policy, PolicyActions, Wake
from gyrostat.sched.views import JobView, Key, VcView


class Optimus(SteadyPolicy):
    def __init__(self, *, interval: float = 600.0, price: float = 0.0, hold: float = 0.0) -> None:
        super().__init__(price=price, hold=hold)
        self.interval = interval

    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        return (job.request.submitted,), math.inf

    def decide(self, view: VcView, now: float) -> PolicyActions:
        yield from self.reconcile(view, self.assign(view, now), now)
        if view.jobs:
            yield Wake(now - now % self.interval + self.interval)

    def borrow(self, view: VcView, now: float) -> PolicyActions:
        yield from Policy.borrow(self, view, now)
        yield from grow_borrowed(view)

    def assign(self, view: VcView, now: float) -> DeviceTargets:
        free = dict(view.capacity)
        given: dict[JobId, dict[str, int]] = {}
        jobs = list(view.jobs.values())
        for job in jobs:
            number = max(job.request.smallest, 1) if job.request.elastic else job.request.devices
            types = [type_ for type_ in view.types_for(job.request) if free.get(type_, 0) >= number]
            types.sort(key=lambda type_: (-view.rate(job, {type_: number}), type_ not in job.counts))
            if types:
                given[job.id] = {types[0]: number}
                free[types[0]] -= number
        heap = [(-gain, job.number, job) for job in jobs if (gain := _gain(view, job, given, free, now)) > 0]
        heapq.heapify(heap)
        while heap:
            expected, number, job = heapq.heappop(heap)
            gain = _gain(view, job, given, free, now)
            if gain <= 0:
                continue
            if -gain > expected:
                heapq.heappush(heap, (-gain, number, job))
                continue
            ((type_, has),) = given[job.id].items()
            given[job.id] = {type_: has + 1}
            free[type_] -= 1
            if (gain := _gain(view, job, given, free, now)) > 0:
                heapq.heappush(heap, (-gain, number, job))
        return DeviceTargets(given, dict.fromkeys(given, "largest reduction of remaining time"))


def _gain(view: VcView, job: JobView, given: dict[JobId, dict[str, int]], free: Counts, now: float) -> float:
    """Seconds by which one more device reduces the job's remaining time."""
    if job.id not in given or not job.request.elastic:
        return 0.0
    ((type_, has),) = given[job.id].items()
    if has >= limit(job) or free.get(type_, 0) < 1:
        return 0.0
    left = job.remaining(now)
    if left is None:
        left = max(job.done(now), 1.0)
    before, after = view.rate(job, {type_: has}), view.rate(job, {type_: has + 1})
    return left / before - left / after if before > 0 and after > before else 0.0
