"""The scheduler's state: every job and VC as policies see them, updated change by change.

Only `sched.tick` writes it, without I/O: the same changes at the same times give the same state and the same plans, on
which a replay relies. An update costs time in proportion to the jobs that it concerns: nothing here iterates over all jobs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from gyrostat.core.devices import Counts, Devices, Fleet
from gyrostat.core.errors import UsageError
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.availability import Availability
from gyrostat.sched.estimates import Estimates
from gyrostat.sched.placers.base import DevicesPlaced, PlacementRefused, Placer
from gyrostat.sched.planner.history import Observation
from gyrostat.sched.port import (
    Bound,
    Change,
    Finished,
    NodeBack,
    NodeLost,
    Progressed,
    Stopped,
    Submitted,
    Withdrawn,
)
from gyrostat.sched.tenant_state import TenantState, Vc
from gyrostat.sched.throughput import AnalyticScaling, Throughput
from gyrostat.sched.views import JobView, VcView


class SchedulerState:
    """Jobs, VCs and their allocations. The placer has the physical side: which device belongs to which job."""

    def __init__(
        self,
        fleet: Fleet,
        vcs: Sequence[Vc],
        placer: Placer,
        throughput: Throughput | None = None,
        history: Iterable[Observation] = (),
    ) -> None:
        self.fleet = fleet
        self.placer = placer
        self.throughput = AnalyticScaling() if throughput is None else throughput
        self.estimates = Estimates(self.throughput, tuple(fleet.totals), history)
        self.now = 0.0
        self.jobs: dict[JobId, JobView] = {}
        self.vcs = {
            vc.name: TenantState(
                vc, VcView(vc.name, weight=vc.weight, rate=self.throughput.rate, fleet=fleet)
            )
            for vc in vcs
        }
        self.before_tick: dict[JobId, tuple[Devices, Devices]] = {}
        """Guaranteed and borrowed devices at the start of this tick, of each job whose devices have changed in it."""
        self.reasons: dict[JobId, str] = {}
        """Why the devices of a job last changed in this tick."""
        self.freed = True
        """Devices have become free since VCs last asked to borrow."""
        self._changes = 0
        """How often a job was put into a queue."""
        self._evicted: set[JobId] = set()
        """Borrowers that were evicted since the last preemption began."""
        self._expiries: list[tuple[float, int, JobView, object]] = []
        self._wakes: list[tuple[float, str]] = []
        self.availability = Availability(fleet)
        self._update_capacity()

    # 1. Changes of the cluster.

    def apply_changes(self, now: float, changes: Sequence[Change]) -> None:
        """Apply what has changed since the last tick, and rank jobs again whose rank has expired."""
        self.now = now
        for change in changes:
            match change:
                case Submitted(request):
                    self._submit(request)
                case Finished(job):
                    self._finish(self.jobs[job])
                case Progressed(job, done, rate):
                    if job in self.jobs:
                        self._progress(self.jobs[job], done, rate)
                case Stopped(job, reason):
                    self.stop(self.jobs[job], reason)
                    self.before_tick[job] = ((), ())
                    self.vcs[self.jobs[job].request.vc].dirty = True
                case Bound(job, devices, borrowed):
                    self._bind(self.jobs[job], devices, borrowed)
                case NodeLost(node):
                    self._remove_devices(self.availability.fail(node), f"node {node} is lost")
                case NodeBack(node):
                    self._add_devices(self.availability.recover(node))
                case Withdrawn(type_, number):
                    self._withdraw(type_, number)
        self._expire()

    def _submit(self, request: JobRequest) -> None:
        if request.vc not in self.vcs:
            raise UsageError(
                f"job {request.id} belongs to VC {request.vc!r}, which this cluster does not have; it has "
                f"{', '.join(self.vcs)}"
            )
        if request.id in self.jobs:
            raise UsageError(f"job {request.id} exists already")
        tenant = self.vcs[request.vc]
        job = JobView(request, self._changes, tenant.view, self.now)
        self.jobs[request.id] = job
        tenant.view.jobs[request.id] = job
        self.estimates.submitted(job)
        self._enqueue(tenant, job)
        tenant.dirty = tenant.wants_to_borrow = True

    def _progress(self, job: JobView, done: float, rate: float) -> None:
        job.report(self.now, done, rate)
        if job.running and self.estimates.measured(job, rate):
            tenant = self.vcs[job.request.vc]
            self._dequeue(job)
            self._enqueue(tenant, job)
            tenant.dirty = tenant.wants_to_borrow = True

    def _finish(self, job: JobView) -> None:
        tenant = self.vcs[job.request.vc]
        self.estimates.finished(job)
        self._dequeue(job)
        if job.running:
            tenant.view.history.add(job.service(self.now))
            self.vcs[job.request.vc].servers.give_back(job.request)
            self._release(job)
            for borrowed in (False, True):
                self._account(tenant, job, (), borrowed)
            self._end_sharing(job)
            self.freed = True
        self.before_tick.pop(job.id, None)
        del self.jobs[job.id], tenant.view.jobs[job.id]
        tenant.dirty = True

    def _bind(self, job: JobView, devices: Devices, borrowed: Devices) -> None:
        self._note_before(job)
        fits = job.running or self.vcs[job.request.vc].servers.fits(job.request)
        for part, of_borrowed in ((devices, False), (borrowed, True)):
            if part and fits and self.placer.restore(job.request, part, of_borrowed):
                self._set_devices(job, part, of_borrowed, "it ran before")
        self.before_tick.pop(job.id)

    def _remove_devices(self, devices: Devices, reason: str) -> None:
        """Devices are not available any more. An elastic job continues on the rest if that is enough; others wait."""
        for part, left in self.placer.remove_devices(devices):
            job = self.jobs[part.job]
            self._evict_guest(job)
            self._note_before(job)
            self._set_devices(job, left, part.borrowed, reason)
            if job.running and (job.held < job.request.smallest or not job.request.elastic):
                self.stop(job, reason)
        self._update_capacity()

    def _add_devices(self, devices: Devices) -> None:
        self.placer.add_devices(devices)
        self._update_capacity()
        self.freed = True

    def _withdraw(self, type_: str, number: int) -> None:
        missing = number - self.availability.withdrawn_count(type_)
        if missing > 0:
            more = self.placer.choose_to_withdraw(type_, missing)
            self.availability.withdraw(type_, more)
            self._remove_devices(more, "needed by a serving load")
        elif missing < 0:
            self._add_devices(self.availability.return_to(type_, number))

    def _update_capacity(self) -> None:
        for name, tenant in self.vcs.items():
            tenant.view.capacity = self.placer.capacity(name)
            tenant.view.lendable = self.placer.lendable()
            tenant.view.reconsider_behind(None)
            tenant.dirty = True

    # 2. Actions of policies.

    def place(self, job: JobView, counts: Counts, borrowed: bool, reason: str) -> bool:
        """Set the number of devices of one part of the job. Returns whether the placer found them."""
        if job.host is not None or job.guest is not None:
            return False
        if not job.running and not self.vcs[job.request.vc].servers.fits(job.request):
            return False
        outcome = self.placer.place(job.request, counts, borrowed)
        if type(outcome) is PlacementRefused:
            self._evict_borrowers(outcome.victims, job)
            return False
        assert type(outcome) is DevicesPlaced
        self._note_before(job)
        self._set_devices(job, outcome.devices, borrowed, reason)
        if outcome.victims:
            self._evict_borrowers(outcome.victims, job)
        return True

    def promote(self, job: JobView, reason: str) -> bool:
        """Turn the job's borrowed allocation into a guaranteed one."""
        outcome = self.placer.promote(job.request)
        if isinstance(outcome, PlacementRefused):
            return False
        self._note_before(job)
        self._set_devices(job, outcome.devices, False, reason)
        self._set_devices(job, (), True, reason)
        self._evict_borrowers(outcome.victims, job)
        return True

    def preempt_for(self, job: JobView, counts: Counts, place: Callable[[], bool]) -> bool:
        """Do `place`; where it needs devices of jobs of lower rank, preempt these. If it fails, nothing has changed."""
        view = job.vc
        if all(view.free(type_) >= wanted for type_, wanted in counts.items()) and place():
            return True
        if view.is_inadmissible(job):
            return False
        victims = self._victims_for(job, counts)
        if victims is None:
            view.note_inadmissible(job)
            return False
        lent = {victim.id: self._lend_to_its_holder(victim) for victim in victims}
        self._evicted.clear()
        if not place():
            for victim in victims:
                if lent[victim.id]:
                    self.placer.restore(victim.request, victim.borrowed, True)
                restored = self.placer.restore(victim.request, victim.devices, False)
                assert restored, f"{victim.id} does not get its devices back"
            view.note_inadmissible(job)
            return False
        reason = f"preempted by {job.id}"
        for victim in victims:
            self._note_before(victim)
            if lent[victim.id] and victim.id not in self._evicted:
                lazily = f"{reason}; keeps its devices as a borrower"
                self._set_devices(victim, _joined(victim.devices, victim.borrowed), True, lazily)
                self._set_devices(victim, (), False, lazily)
                continue
            self._evict_guest(victim)
            self._set_devices(victim, (), False, reason)
            if 0 < len(victim.borrowed) < victim.request.smallest:  # its borrowed devices alone are too few
                self.stop(victim, reason)
        return True

    def _lend_to_its_holder(self, victim: JobView) -> bool:
        """Release a preempted job's guaranteed devices. Where devices are lent it borrows them: it keeps them if others can be
        had instead (HiveD's lazy preemption).
        """
        self.placer.release(victim.id, False)
        if not self.placer.lends or victim.guest is not None:
            return False
        return self.placer.restore(victim.request, _joined(victim.devices, victim.borrowed), True)

    def _victims_for(self, job: JobView, counts: Counts) -> list[JobView] | None:
        """The jobs of lower rank to preempt for this one. None: not even all of them make room."""
        if not job.vc.outranks_a_holder(job):
            return None
        short = sum(counts.values()) - sum(job.vc.free(type_) for type_ in counts)
        if short > 0 and short > job.vc.holding.devices_behind(job):
            return None
        candidates = (
            (other.id, other.devices) for other in job.vc.holding.lowest_behind(job) if other.host is None
        )
        victims = self.placer.victims_for(job.request, counts, candidates)
        return None if victims is None else [self.jobs[victim] for victim in victims]

    def share(self, job: JobView, host: JobView, reason: str) -> bool:
        """Let a waiting job run on the devices of another one, which has them too."""
        same_size = len(host.devices) == job.request.devices and not host.borrowed
        if job.running or not same_size or host.guest is not None or host.host is not None:
            return False
        if not self.vcs[job.request.vc].servers.fits(job.request):
            return False
        self._note_before(job)
        job.host, host.guest = host, job
        self._set_devices(job, host.devices, False, reason)
        return True

    def reset_service(self, job: JobView) -> None:
        job.reset_service(self.now)

    def defragment(self, job: JobView, reason: str) -> bool:
        """Migrate a part of the job so that larger blocks of devices become free."""
        if job.host is not None or job.guest is not None or not job.running:
            return False
        borrowed = not job.devices
        outcome = self.placer.defragment(job.request, job.borrowed if borrowed else job.devices, borrowed)
        if isinstance(outcome, PlacementRefused):
            return False
        self._note_before(job)
        self._set_devices(job, outcome.devices, borrowed, reason)
        self._evict_borrowers(outcome.victims, job)
        self.freed = True
        return True

    def stop(self, job: JobView, reason: str) -> None:
        """Take all devices from the job."""
        self._evict_guest(job)
        self._note_before(job)
        self._release(job)
        for borrowed in (False, True):
            self._set_devices(job, (), borrowed, reason)
        self._end_sharing(job)

    def _release(self, job: JobView) -> None:
        """Release the job's devices in the placer. A guest has none there: they are its host's."""
        if job.host is None:
            for borrowed, devices in ((False, job.devices), (True, job.borrowed)):
                if devices:
                    self.placer.release(job.id, borrowed)

    def _evict_guest(self, host: JobView) -> None:
        if host.guest is not None:
            self.stop(host.guest, f"its host {host.id} loses its devices")

    def _end_sharing(self, job: JobView) -> None:
        """The job has lost its devices and shares them no longer. A guest that still runs on them becomes their holder."""
        if job.host is not None:
            job.host.guest, job.host = None, None
        if (guest := job.guest) is not None:
            job.guest = guest.host = None
            kept = self.placer.restore(guest.request, guest.devices, False)
            assert kept, f"{guest.id} does not get what {job.id} had"
            devices, guest.devices, guest.counts = guest.devices, (), {}
            self._account(self.vcs[guest.request.vc], guest, devices, False)

    def _evict_borrowers(self, victims: Sequence[JobId], by: JobView) -> None:
        for victim in victims:
            self._evict_borrowed_part(self.jobs[victim], f"its borrowed devices are reclaimed for {by.id}")

    def _evict_borrowed_part(self, job: JobView, reason: str) -> None:
        """The placer has reclaimed the job's borrowed devices. It continues on the rest if that is enough."""
        self._evicted.add(job.id)
        self._note_before(job)
        self._set_devices(job, (), True, reason)
        if job.running and job.held < job.request.smallest:
            self.stop(job, reason)
        tenant = self.vcs[job.request.vc]
        tenant.dirty = tenant.wants_to_borrow = True

    def _note_before(self, job: JobView) -> None:
        """Keep the devices that the job had when the tick began."""
        if job.id not in self.before_tick:
            self.before_tick[job.id] = (job.devices, job.borrowed)

    def _set_devices(self, job: JobView, devices: Devices, borrowed: bool, reason: str) -> None:
        """Make these the devices of one part of the job: account for them and put the job into its queue."""
        if devices == (job.borrowed if borrowed else job.devices):
            return
        tenant = self.vcs[job.request.vc]
        self.reasons[job.id] = reason
        ran = job.running
        if len(devices) < len(job.borrowed if borrowed else job.devices):
            self.freed = True
        job.settle(self.now)
        self._account(tenant, job, devices, borrowed)
        if not job.running:
            job.waiting_since = self.now
            tenant.wants_to_borrow = True
            if ran:
                self.vcs[job.request.vc].servers.give_back(job.request)
        elif not ran:
            job.starts += 1
            self.vcs[job.request.vc].servers.take(job.request)
        if job.devices and job.started is None:
            job.started = self.now
        self._dequeue(job)
        self._enqueue(tenant, job)

    def _account(self, tenant: TenantState, job: JobView, devices: Devices, borrowed: bool) -> None:
        table = tenant.view.borrowed if borrowed else tenant.view.used
        counts = self.fleet.count(devices) if devices else {}
        if job.host is None:
            for type_, number in (job.borrowed_counts if borrowed else job.counts).items():
                table[type_] -= number
            for type_, number in counts.items():
                table[type_] = table.get(type_, 0) + number
        if borrowed:
            job.borrowed, job.borrowed_counts = devices, counts
        else:
            job.devices, job.counts = devices, counts

    # 3. Queues, and when to decide again.

    def _enqueue(self, tenant: TenantState, job: JobView) -> None:
        """Put the job into the queue of its state, at its rank."""
        self._changes += 1
        job.changed = self._changes
        key, until = tenant.policy.rank(job, self.now)
        view = tenant.view
        queue = view.holding if job.devices else view.borrowing if job.borrowed else view.waiting
        queue.add(job, key)
        if until != math.inf:
            heapq.heappush(self._expiries, (until, job.number, job, job.entry))

    def _dequeue(self, job: JobView) -> None:
        assert job.queue is not None
        if job.queue is job.vc.holding:
            job.vc.reconsider_behind(job)
        job.queue.remove(job)

    def wake_at(self, tenant: TenantState, at: float) -> None:
        """Let this VC's policy decide again at that time."""
        if at < tenant.wake_at:
            tenant.wake_at = at
            heapq.heappush(self._wakes, (at, tenant.view.name))

    def next_wake(self) -> float | None:
        """When the next rank expires or the next policy decides again."""
        while self._expiries and self._expiries[0][3] is not self._expiries[0][2].entry:
            heapq.heappop(self._expiries)
        times = [heap[0][0] for heap in (self._expiries, self._wakes) if heap]
        return min(times, default=None)

    def _expire(self) -> None:
        """Rank jobs again whose rank has expired, and mark VCs whose policy asked to decide again now. A new rank that expires
        at once holds for this tick.
        """
        expired = []
        while self._expiries and self._expiries[0][0] <= self.now:
            expired.append(heapq.heappop(self._expiries))
        for _, _, job, entry in expired:
            if job.entry is not entry or job.queue is None:
                continue
            tenant = self.vcs[job.request.vc]
            self._dequeue(job)
            self._enqueue(tenant, job)
            tenant.dirty = True
        while self._wakes and self._wakes[0][0] <= self.now:
            at, name = heapq.heappop(self._wakes)
            tenant = self.vcs[name]
            if at >= tenant.wake_at:
                tenant.wake_at = math.inf
                tenant.dirty = True


def _joined(some: Devices, others: Devices) -> Devices:
    return tuple(sorted((*some, *others)))
