"""EasyScale's inter-job scheduler (§3.4): devices go where they speed up most.

Every job's intra-job planner proposes further devices of one type; the proposal with the highest speed-up per device wins,
among equal ones the larger. Minimum 0: a job starts on its first device and grows, so nobody waits for a gang. When all
devices are taken, a waiting job gets its first one from the running job that loses least by giving it up. Jobs whose
model may (`mixes_types`) use several types at once, unless `mixed` is off (EasyScale's homogeneous mode); a job moves to
another type where that alone is faster. Inelastic jobs get what they asked for when it is free, and keep it.
"""

from __future__ import annotations

import heapq
import math

from gyrostat.sched.policies.proposals import Table, grow, grow_borrowed
from gyrostat.sched.policies.steady import Assignment, SteadyPolicy
from gyrostat.sched.policy import Policy, Wishes
from gyrostat.sched.views import JobView, Key, VcView


class EasyScale(SteadyPolicy):
    def __init__(
        self, *, mixed: bool = True, price: float = 0.0, hold: float = 60.0, timeout: float = 3600.0
    ) -> None:
        super().__init__(price=price, hold=hold)
        self.mixed = mixed
        self.timeout = timeout
        """A job that has waited for so long is served before all others, from whoever has most."""

    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        if job.running:
            return (1, job.request.submitted), math.inf
        overdue = job.waiting_since + self.timeout
        return (0 if now >= overdue else 1, job.request.submitted), overdue if now < overdue else math.inf

    def assign(self, view: VcView, now: float) -> Assignment:
        table = Table(view, mixed=self.mixed)
        self._start(table, view, now)
        if any(table.free.values()):
            self._grow(table, view, now)
        return table.assignment

    def borrow(self, view: VcView, now: float) -> Wishes:
        yield from Policy.borrow(self, view, now)
        yield from grow_borrowed(view)

    def _start(self, table: Table, view: VcView, now: float) -> None:
        """Everybody who waits gets a first device, free or from whoever loses least by giving one up."""
        donors: list[tuple[float, int, JobView]] | None = None
        for job in sorted((*view.waiting, *view.borrowing), key=lambda each: each.entry or ()):
            if not job.request.elastic:
                if (type_ := table.roomiest(job, job.request.devices)) is not None:
                    table.give(job, {type_: job.request.devices}, "all that it asked for is free")
                continue
            first = max(job.request.smallest, 1)
            if (type_ := table.roomiest(job, first)) is not None:
                table.give(job, {type_: first}, "a first device")
                continue
            if donors is None:
                donors = [
                    (loss, each.number, each)
                    for each in view.holding
                    if (loss := table.loss(each)) is not None
                ]
                heapq.heapify(donors)
            if first > 1 or not self._take_from(table, donors, job):
                return

    def _take_from(self, table: Table, donors: list[tuple[float, int, JobView]], job: JobView) -> bool:
        while donors:
            expected, number, donor = heapq.heappop(donors)
            loss = table.loss(donor)
            if loss is None:
                continue
            if loss > expected:
                heapq.heappush(donors, (loss, number, donor))
                continue
            type_ = table.dispensable(donor)
            if type_ not in table.types(job):
                continue
            table.give(donor, {**table.held(donor), type_: table.held(donor)[type_] - 1}, f"{job.id} starts")
            table.give(job, {type_: 1}, f"a first device, from {donor.id}, which loses least")
            if (loss := table.loss(donor)) is not None:
                heapq.heappush(donors, (loss, number, donor))
            return True
        return False

    def _grow(self, table: Table, view: VcView, now: float) -> None:
        """Those that were not resized just now make proposals."""
        jobs = [job for job in view.jobs.values() if job.request.elastic and table.held(job)]
        grow(table, [job for job in jobs if not job.counts or now >= job.since + self.hold])
