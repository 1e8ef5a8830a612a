"""The scheduler's books: every job and VC as policies see them, brought up to date change by change.

Only `sched.tick` writes here, and it does no I/O: the same changes at the same times give the same books and the same
plans, which is what a replay relies on. What happens costs what it touches: nothing here walks over all jobs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gyrostat.core.devices import Counts, Devices, Fleet
from gyrostat.core.errors import UsageError
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.estimates import Estimates
from gyrostat.sched.placers.base import DevicesPlaced, PlacementRefused, Placer
from gyrostat.sched.policy import Policy
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
from gyrostat.sched.throughput import AnalyticScaling, Throughput
from gyrostat.sched.views import JobView, VcView


@dataclass(frozen=True, kw_only=True)
class Vc:
    """A virtual cluster as it is set up: its policy, and its weight when others' unused devices are lent."""

    name: str
    policy: Policy
    weight: float = 1.0


class TenantState:
    """One VC: the view that its policy sees, and when that should look again."""

    def __init__(self, vc: Vc, view: VcView) -> None:
        self.policy = vc.policy
        self.view = view
        self.dirty = True
        """Something that its policy may care about has changed."""
        self.wants_to_borrow = True
        """Its waiting jobs have changed since it last asked for devices of others."""
        self.wake_at = math.inf

    @property
    def borrowed_share(self) -> float:
        return sum(self.view.borrowed.values()) / self.view.weight


class SchedulerState:
    """All of it."""

    def __init__(
        self,
        fleet: Fleet,
        vcs: Sequence[Vc],
        placer: Placer,
        throughput: Throughput | None = None,
    ) -> None:
        self.fleet = fleet
        self.placer = placer
        self.throughput = AnalyticScaling() if throughput is None else throughput
        self.estimates = Estimates(self.throughput, tuple(fleet.totals))
        self.now = 0.0
        self.jobs: dict[JobId, JobView] = {}
        self.vcs = {
            vc.name: TenantState(
                vc, VcView(vc.name, weight=vc.weight, rate=self.throughput.rate, fleet=fleet)
            )
            for vc in vcs
        }
        self.before_tick: dict[JobId, tuple[Devices, Devices]] = {}
        """In this tick: what jobs had before it, their own devices and the borrowed ones."""
        self.reasons: dict[JobId, str] = {}
        """In this tick: why the devices of a job last changed."""
        self.freed = True
        """Devices have become free since everybody last asked for some."""
        self._submissions = 0
        self._expiries: list[tuple[float, int, JobView, object]] = []
        self._wakes: list[tuple[float, str]] = []
        self.withdrawn: dict[str, Devices] = {}
        """By type: what serving loads have."""
        self._lost_nodes: set[str] = set()
        self._update_capacity()

    # 1. What has happened.

    def apply_changes(self, now: float, changes: Sequence[Change]) -> None:
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
                    self._lost_nodes.add(node)
                    self._remove_devices(tuple(self._devices_of(node)), f"node {node} is lost")
                case NodeBack(node):
                    self._lost_nodes.discard(node)
                    withdrawn = {device for devices in self.withdrawn.values() for device in devices}
                    self._add_devices(tuple(d for d in self._devices_of(node) if d not in withdrawn))
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
            raise UsageError(f"there already is a job {request.id}")
        tenant = self.vcs[request.vc]
        job = JobView(request, self._submissions, tenant.view, self.now)
        self._submissions += 1
        self.jobs[request.id] = job
        tenant.view.jobs[request.id] = job
        self.estimates.submitted(job)
        self.enqueue(tenant, job)
        tenant.dirty = tenant.wants_to_borrow = True

    def _progress(self, job: JobView, done: float, rate: float) -> None:
        job.report(self.now, done, rate)
        if job.running and self.estimates.measured(job, rate):
            tenant = self.vcs[job.request.vc]
            self._dequeue(job)
            self.enqueue(tenant, job)
            tenant.dirty = tenant.wants_to_borrow = True

    def _finish(self, job: JobView) -> None:
        tenant = self.vcs[job.request.vc]
        self.estimates.finished(job)
        self._dequeue(job)
        if job.running:
            tenant.view.history.add(job.service(self.now))
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
        for part, of_borrowed in ((devices, False), (borrowed, True)):
            if part and self.placer.restore(job.request, part, of_borrowed):
                self._set_devices(job, part, of_borrowed, "it ran before")
        self.before_tick.pop(job.id)

    def _remove_devices(self, devices: Devices, reason: str) -> None:
        """Devices are gone. An elastic job goes on with what it has left if that is enough; others wait."""
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
        has = self.withdrawn.get(type_, ())
        if number > len(has):
            more = self.placer.choose_to_withdraw(type_, number - len(has))
            self.withdrawn[type_] = (*has, *more)
            self._remove_devices(more, "needed by a serving load")
        elif number < len(has):
            back = has[number:]
            self.withdrawn[type_] = has[:number]
            lost = {device for node in self._lost_nodes for device in self._devices_of(node)}
            self._add_devices(tuple(device for device in back if device not in lost))

    def _devices_of(self, node: str) -> range:
        if node not in self.fleet.position:
            raise UsageError(f"there is no node {node!r} in this cluster")
        return self.fleet.nodes[self.fleet.position[node]].devices

    def _update_capacity(self) -> None:
        for name, tenant in self.vcs.items():
            tenant.view.capacity = self.placer.capacity(name)
            tenant.view.lendable = self.placer.lendable()
            tenant.view.reconsider_behind(None)
            tenant.dirty = True

    # 2. What is decided.

    def place(self, job: JobView, counts: Counts, borrowed: bool, reason: str) -> bool:
        """Let a part of the job have so many devices."""
        if job.host is not None or job.guest is not None:
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
        """Turn what the job borrows into its share of the guarantee."""
        outcome = self.placer.promote(job.request)
        if isinstance(outcome, PlacementRefused):
            return False
        self._note_before(job)
        self._set_devices(job, outcome.devices, False, reason)
        self._set_devices(job, (), True, reason)
        self._evict_borrowers(outcome.victims, job)
        return True

    def preempt_for(self, job: JobView, counts: Counts, place: Callable[[], bool]) -> bool:
        """Do `place`, if need be with what jobs of lower rank then give up; or leave all as it was."""
        view = job.vc
        if all(view.free(type_) >= wanted for type_, wanted in counts.items()) and place():
            return True
        if view.is_inadmissible(job):
            return False
        victims = self._victims_for(job, counts)
        if victims is None:
            view.note_inadmissible(job)
            return False
        for victim in victims:
            self.placer.release(victim.id, False)
        if not place():
            for victim in victims:
                restored = self.placer.restore(victim.request, victim.devices, False)
                assert restored, f"{victim.id} does not get back what it just had"
            view.note_inadmissible(job)
            return False
        for victim in victims:
            self._evict_guest(victim)
            self._note_before(victim)
            self._set_devices(victim, (), False, f"gives way to {job.id}")
            if 0 < len(victim.borrowed) < victim.request.smallest:  # what it borrowed is not enough to go on
                self.stop(victim, f"gives way to {job.id}")
        return True

    def _victims_for(self, job: JobView, counts: Counts) -> list[JobView] | None:
        """Of the jobs that rank behind this one. None: even all of them are not enough."""
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
        """Let a waiting job use the devices of another."""
        alike = len(host.devices) == job.request.devices and not host.borrowed
        if job.running or not alike or host.guest is not None or host.host is not None:
            return False
        self._note_before(job)
        job.host, host.guest = host, job
        self._set_devices(job, host.devices, False, reason)
        return True

    def reset_service(self, job: JobView) -> None:
        job.reset_service(self.now)

    def defragment(self, job: JobView, reason: str) -> bool:
        """Move a part of the job to where it leaves the larger holes."""
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
        """A guest's devices are its host's: there is nothing to release."""
        if job.host is None:
            for borrowed, devices in ((False, job.devices), (True, job.borrowed)):
                if devices:
                    self.placer.release(job.id, borrowed)

    def _evict_guest(self, host: JobView) -> None:
        if host.guest is not None:
            self.stop(host.guest, f"its host {host.id} loses its devices")

    def _end_sharing(self, job: JobView) -> None:
        """It shares no longer: it has lost its devices. A guest that is still there has them for itself."""
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
            self._evict_borrowed_part(self.jobs[victim], f"its borrowed devices are needed by {by.id}")

    def _evict_borrowed_part(self, job: JobView, reason: str) -> None:
        """The placer has taken its borrowed part. The rest goes on if it is enough."""
        self._note_before(job)
        self._set_devices(job, (), True, reason)
        if job.running and job.held < job.request.smallest:
            self.stop(job, reason)
        tenant = self.vcs[job.request.vc]
        tenant.dirty = tenant.wants_to_borrow = True

    def _note_before(self, job: JobView) -> None:
        """Remember what it had when the tick began."""
        if job.id not in self.before_tick:
            self.before_tick[job.id] = (job.devices, job.borrowed)

    def _set_devices(self, job: JobView, devices: Devices, borrowed: bool, reason: str) -> None:
        """From now on the part consists of these devices."""
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
        elif not ran:
            job.starts += 1
        if job.devices and job.started is None:
            job.started = self.now
        self._dequeue(job)
        self.enqueue(tenant, job)

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

    # 3. In which order, and when to look again.

    def enqueue(self, tenant: TenantState, job: JobView) -> None:
        """Into the queue that it belongs to, at its rank."""
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
        """Ask this VC's policy again at that time."""
        if at < tenant.wake_at:
            tenant.wake_at = at
            heapq.heappush(self._wakes, (at, tenant.view.name))

    def next_wake(self) -> float | None:
        """When a rank expires or a policy wants to be asked."""
        while self._expiries and self._expiries[0][3] is not self._expiries[0][2].entry:
            heapq.heappop(self._expiries)
        times = [heap[0][0] for heap in (self._expiries, self._wakes) if heap]
        return min(times, default=None)

    def _expire(self) -> None:
        """Rank again those whose rank has expired, and mark VCs that wanted to be asked."""
        while self._expiries and self._expiries[0][0] <= self.now:
            _, _, job, entry = heapq.heappop(self._expiries)
            if job.entry is not entry or job.queue is None:
                continue
            tenant = self.vcs[job.request.vc]
            self._dequeue(job)
            self.enqueue(tenant, job)
            tenant.dirty = True
        while self._wakes and self._wakes[0][0] <= self.now:
            at, name = heapq.heappop(self._wakes)
            tenant = self.vcs[name]
            if at >= tenant.wake_at:
                tenant.wake_at = math.inf
                tenant.dirty = True
