"""EasyScale's inter-job scheduler (§3.4): devices go to the jobs that gain most from them.

Every job's intra-job planner proposes further devices of one type; the proposal with the highest speedup per device wins,
among equal ones the larger. A job starts on its first device and grows, so no job waits for a gang. When all devices are in
use, a waiting job gets its first one from the running job that loses least. Jobs with `mixes_types` use several types at
once, unless `mixed` is off (EasyScale's homogeneous mode); a job migrates to another type if that alone is faster. Inelastic
jobs get the devices that they request when these are free, and keep them.

The expected gain comes from the job's companion (`sched.estimates`), which measurements correct. A job that has not become
faster after a growth returns to its former size.
"""

from __future__ import annotations

import heapq
import math

from gyrostat.core.devices import format_counts
from gyrostat.sched.estimates import unhelpful
from gyrostat.sched.policies.proposals import TentativeAllocation, grow, grow_borrowed
from gyrostat.sched.policies.steady import DeviceTargets, SteadyPolicy
from gyrostat.sched.policy import Policy, PolicyActions
from gyrostat.sched.views import JobView, Key, VcView


class EasyScale(SteadyPolicy):
    def __init__(
        self, *, mixed: bool = True, price: float = 0.0, hold: float = 60.0, timeout: float = 3600.0
    ) -> None:
        super().__init__(price=price, hold=hold)
        self.mixed = mixed
        self.timeout = timeout
        """A job that has waited for this many seconds ranks before all others."""

    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        if job.running:
            return (1, job.request.submitted), math.inf
        overdue = job.waiting_since + self.timeout
        return (0 if now >= overdue else 1, job.request.submitted), overdue if now < overdue else math.inf

    def assign(self, view: VcView, now: float) -> DeviceTargets:
        table = TentativeAllocation(view, mixed=self.mixed)
        self._release_unhelpful(table, view)
        self._start(table, view)
        if any(table.free.values()):
            self._grow(table, view, now)
        return table.assignment

    def borrow(self, view: VcView, now: float) -> PolicyActions:
        yield from Policy.borrow(self, view, now)
        yield from grow_borrowed(view)

    def _release_unhelpful(self, table: TentativeAllocation, view: VcView) -> None:
        """Release devices that did not help; a job that migrated to another type migrates back if there is room."""
        for job in view.holding:
            if not (added := unhelpful(job)) or job.borrowed:
                continue
            held = table.held(job)
            kept = {type_: number - added.get(type_, 0) for type_, number in held.items()}
            if not any(kept.values()):
                kept = dict(job.before)
            fits = all(table.free.get(type_, 0) + held.get(type_, 0) >= n for type_, n in kept.items())
            if fits and sum(kept.values()) >= max(job.request.smallest, 1):
                table.assign(job, kept, f"no faster with {format_counts(added)} more")
                table.assignment.released.add(job.id)

    def _start(self, table: TentativeAllocation, view: VcView) -> None:
        """Give every waiting job its first device: a free one, or one of the running job that loses least."""
        donors: _Donors | None = None
        for job in sorted((*view.waiting, *view.borrowing), key=lambda each: each.entry or ()):
            first = max(job.request.smallest, 1) if job.request.elastic else job.request.devices
            if (type_ := table.fastest(job, first)) is not None:
                table.assign(
                    job, {type_: first}, "a first device" if first == 1 else f"the first {first} devices"
                )
            elif job.request.elastic and first == 1:
                donors = donors or _Donors(table, view)
                if not donors.take_for(job):
                    return

    def _grow(self, table: TentativeAllocation, view: VcView, now: float) -> None:
        """Grow jobs that were not resized within `hold` and have not released devices at this instant."""
        jobs = [job for job in view.jobs.values() if job.request.elastic and table.held(job)]
        released = table.assignment.released
        ready = [
            job
            for job in jobs
            if not job.counts
            or (now >= job.since + self.hold and (now > job.since or sum(job.before.values()) <= job.held))
        ]
        grow(table, [job for job in ready if job.id not in released])


class _Donors:
    """Running jobs that can lose a device, by its type; the one that loses least speed first."""

    def __init__(self, table: TentativeAllocation, view: VcView) -> None:
        self._table = table
        self._heaps: dict[str, list[tuple[float, int, JobView]]] = {type_: [] for type_ in view.capacity}
        for job in view.holding:
            self._offer(job)

    def _offer(self, job: JobView) -> None:
        for type_ in self._table.held(job):
            if (loss := self._table.loss(job, type_)) is not None:
                heapq.heappush(self._heaps[type_], (loss, job.number, job))

    def _least(self, type_: str) -> tuple[float, JobView] | None:
        """The job that loses least by losing one device of this type; outdated offers are dropped."""
        heap = self._heaps.get(type_, [])
        while heap:
            loss, _, donor = heap[0]
            if self._table.loss(donor, type_) == loss:
                return loss, donor
            heapq.heappop(heap)
        return None

    def take_for(self, job: JobView) -> bool:
        """Take a device for `job` where its speed exceeds the donor's loss most."""
        speeds = {type_: self._table.view.rate(job, {type_: 1}) for type_ in self._table.types(job)}
        best: tuple[float, str, JobView] | None = None
        for type_, speed in speeds.items():
            least = self._least(type_)
            if least is not None and speed > 0:
                worth = speed / max(speeds.values()) - least[0]
                if best is None or worth > best[0]:
                    best = (worth, type_, least[1])
        if best is None:
            return False
        _, type_, donor = best
        table, held = self._table, self._table.held(donor)
        table.assign(donor, {**held, type_: held[type_] - 1}, f"{job.id} starts")
        table.assign(job, {type_: 1}, f"a first device, from {donor.id}, which loses least")
        self._offer(donor)
        return True
