"""The simulated cluster: a heap of future events, and a clock that advances from one event to the next.

It knows what a scheduler does not: how long jobs take, when nodes fail, how a serving load changes. Jobs come from an
iterator, and finished ones are passed to a recorder and dropped, so memory depends on the active jobs and not on the length
of the trace. Ties are broken by a counter: the same input gives the same run, bit for bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from gyrostat.core.clock import VirtualClock
from gyrostat.core.devices import Devices, Fleet
from gyrostat.core.errors import UsageError
from gyrostat.core.plan import Plan, Preempt, Resize, Start
from gyrostat.core.request import JobId
from gyrostat.sched.port import Change, Finished, NodeLost, Progressed, Snapshot, Submitted
from gyrostat.sched.throughput import AnalyticScaling, Throughput
from gyrostat.sim.job import TraceJob

_MAX_IDLE_EVENTS = 10_000
"""If only waiting jobs are left and none starts for this many events, the simulation ends: they are too large."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Overheads besides training, in seconds unless stated otherwise; 0 by default."""

    start: float = 0.0
    """From the allocation to the first step: images, imports, loading the last checkpoint."""
    rescale: float = 0.0
    """Pause of a job when its devices change."""
    checkpoint_every: float = 0.0
    """Interval of checkpoints: a job whose node fails loses at most this much work. 0: it loses none."""
    spread: float = 0.0
    """Affinity: the share of speed that a job loses per node beyond those that it needs (0.1: a tenth). At least a quarter
    of the speed is left.
    """
    sharing: float = 0.5
    """The share of its speed that a job keeps on devices that it shares with another job."""
    measure: float = 0.0
    """From a change of devices to the report of the new throughput. 0: it is reported with the next event."""


class SimulationRecorder(Protocol):
    """Receives the changes of jobs; `sim.records` implements it."""

    def arrived(self, now: float) -> None: ...

    def changed(self, now: float, job: ActiveJob, before: Devices, after: Devices, kind: str) -> None: ...

    def finished_job(self, now: float, job: ActiveJob) -> None: ...


class ActiveJob:
    """The state of a job that has arrived and not finished."""

    __slots__ = (
        "borrowed",
        "devices",
        "first_start",
        "held_since",
        "job",
        "left",
        "migrations",
        "partner",
        "preemptions",
        "ran",
        "rate",
        "service",
        "since",
        "version",
        "work",
    )

    def __init__(self, job: TraceJob, work: float) -> None:
        self.job = job
        self.devices: Devices = ()
        self.borrowed: Devices = ()
        """The subset of `devices` that is borrowed."""
        self.work = work
        """Total units of work."""
        self.left = work
        self.rate = 0.0
        self.since = job.request.submitted
        """Since when it makes progress at `rate`; in the future while it starts."""
        self.held_since = self.since
        """When its devices last changed."""
        self.version = 0
        """Version of its finish event: outdated events are ignored."""
        self.partner: ActiveJob | None = None
        """The job that shares its devices."""
        self.first_start: float | None = None
        self.ran = 0.0
        """Seconds with devices; the rest of the time it waited."""
        self.service = 0.0
        self.preemptions = 0
        self.migrations = 0


class SimCluster:
    """The simulator's `Cluster`."""

    def __init__(
        self,
        fleet: Fleet,
        jobs: Iterable[TraceJob],
        *,
        recorder: SimulationRecorder,
        throughput: Throughput | None = None,
        costs: Costs | None = None,
        changes: Iterable[Iterator[tuple[float, Change]]] = (),
        horizon: float | None = None,
    ) -> None:
        """`throughput`: the actual throughput of jobs. `changes`: streams of further changes (nodes, serving load), each in
        order of time; they may be endless.
        """
        self.fleet = fleet
        self.clock = VirtualClock()
        self.active: dict[JobId, ActiveJob] = {}
        self.events = 0
        """Number of events so far."""
        self._throughput = AnalyticScaling() if throughput is None else throughput
        self._costs = Costs() if costs is None else costs
        self._recorder = recorder
        self._horizon = horizon
        self._counter = count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._finishing: list[tuple[float, int, ActiveJob, int]] = []
        self._changes: list[Change] = []
        self._idle_events = 0
        """Events since the last plan with actions."""
        self._jobs = iter(jobs)
        self._next_job = next(self._jobs, None)
        for stream in changes:
            self._schedule(iter(stream))
        if self._next_job is not None:
            self.clock.advance(self._next_job.request.submitted)
        self._process_due()

    # The interface of clusters.

    def observe(self) -> Snapshot:
        changes = tuple(self._changes)
        self._changes.clear()
        return Snapshot(self.clock.now(), changes, closed=self._next_time() is None)

    def apply(self, plan: Plan) -> None:
        now = self.clock.now()
        self._idle_events = 0
        for action in plan.actions:
            job = self.active[action.job]
            before = job.devices
            match action:
                case Start(_, devices, _, borrowed, shares_with):
                    if shares_with is not None:
                        self._share(job, self.active[shares_with])
                    if job.first_start is None:
                        job.first_start = now
                    self._run(job, devices, pause=self._costs.start)
                    kind = "start"
                case Resize(_, _, devices, _, borrowed):
                    same = devices == before
                    job.migrations += action.migrates
                    if not same:
                        self._run(job, devices, pause=self._costs.rescale)
                    kind = "resize"
                case Preempt():
                    borrowed = ()
                    job.preemptions += 1
                    self._run(job, (), pause=0.0)
                    kind = "preempt"
            job.borrowed = borrowed
            self._recorder.changed(now, job, before, job.devices, kind)

    def wait(self, until: float | None) -> None:
        upcoming = self._next_time()
        if until is not None and (upcoming is None or until < upcoming):
            self.clock.advance(until)
            return
        if upcoming is not None:
            self.clock.advance(upcoming)
            self._process_due()

    # Events.

    def _next_time(self) -> float | None:
        """When the next event is due; None if no further event concerns a job."""
        self._drop_outdated()
        times = [heap[0][0] for heap in (self._finishing, self._heap) if heap]
        if self._next_job is not None:
            times.append(self._next_job.request.submitted)
        elif not self.active or (not self._finishing and self._idle_events > _MAX_IDLE_EVENTS):
            return None
        upcoming = min(times, default=None)
        return (
            None if upcoming is None or (self._horizon is not None and upcoming > self._horizon) else upcoming
        )

    def _drop_outdated(self) -> None:
        finishing = self._finishing
        while finishing and finishing[0][3] != finishing[0][2].version:
            heapq.heappop(finishing)

    def _process_due(self) -> None:
        """Process all events that are due; events of one instant share a tick."""
        now = self.clock.now()
        while self._finishing and self._finishing[0][0] <= now:
            _, _, job, version = heapq.heappop(self._finishing)
            if version == job.version:
                self._finish(job)
        while self._heap and self._heap[0][0] <= now:
            self.events += 1
            self._idle_events += 1
            heapq.heappop(self._heap)[2]()
        while self._next_job is not None and self._next_job.request.submitted <= now:
            self._arrive(self._next_job)
            following = next(self._jobs, None)
            if following is not None and following.request.submitted < self._next_job.request.submitted:
                raise UsageError(
                    f"jobs must be in order of submission; {following.request.id} comes after "
                    f"{self._next_job.request.id}"
                )
            self._next_job = following

    def _schedule(self, stream: Iterator[tuple[float, Change]]) -> None:
        following = next(stream, None)
        if following is None:
            return
        at, change = following

        def occur() -> None:
            self._changes.append(change)
            if isinstance(change, NodeLost):
                self._fail_node(change.node)
            self._schedule(stream)

        heapq.heappush(self._heap, (at, next(self._counter), occur))

    def _arrive(self, job: TraceJob) -> None:
        self.events += 1
        reference = {self._reference(job): job.request.devices}
        work = job.duration * self._throughput.rate(job.request, reference)
        self.active[job.request.id] = ActiveJob(job, work)
        self._recorder.arrived(self.clock.now())
        self._changes.append(Submitted(job.request))

    def _reference(self, job: TraceJob) -> str:
        return job.request.types[0] if job.request.types else self.fleet.nodes[0].type

    def _finish(self, job: ActiveJob) -> None:
        self.events += 1
        before = job.devices
        self._run(job, (), pause=0.0)
        now = self.clock.now()
        self._recorder.changed(now, job, before, (), "finish")
        self._recorder.finished_job(now, job)
        del self.active[job.job.request.id]
        self._changes.append(Finished(job.job.request.id))

    def _fail_node(self, node: str) -> None:
        """Jobs on the node restart from their last checkpoint; the scheduler takes their devices."""
        devices = set(self.fleet.nodes[self.fleet.position[node]].devices)
        every = self._costs.checkpoint_every
        if not every:
            return
        for job in self.active.values():
            if devices.intersection(job.devices):
                ran = max(0.0, self.clock.now() - job.since)
                job.left += job.rate * min(ran, every)

    # Progress of jobs.

    def _run(self, job: ActiveJob, devices: Devices, *, pause: float) -> None:
        """Run the job on these devices, after a pause."""
        if job.partner is not None and job.devices:
            self._unshare(job)
        self._settle(job)
        job.devices = devices
        self._set_rate(job, self.clock.now() + pause)

    def _settle(self, job: ActiveJob) -> None:
        """Account for the progress on its devices until now."""
        now = self.clock.now()
        if job.devices:
            job.left = max(0.0, job.left - job.rate * max(0.0, now - job.since))
            job.ran += now - job.held_since
            job.service += (now - job.held_since) * len(job.devices)
        job.held_since = now

    def _set_rate(self, job: ActiveJob, since: float) -> None:
        """Set the rate that its devices allow, from `since` on."""
        job.version += 1
        job.since = since
        job.rate = self._rate(job) if job.devices else 0.0
        if job.rate > 0:
            finish = since + job.left / job.rate
            heapq.heappush(self._finishing, (finish, next(self._counter), job, job.version))
        if job.job.request.work is not None or job.job.request.elastic:
            self._report(job)

    def _report(self, job: ActiveJob) -> None:
        """Report progress and throughput to the scheduler; after `Costs.measure` seconds, if set."""
        if not self._costs.measure or not job.devices:
            self._changes.append(Progressed(job.job.request.id, job.work - job.left, job.rate))
            return
        version = job.version

        def report() -> None:
            if job.version == version:
                done = job.work - job.left + job.rate * (self.clock.now() - job.since)
                self._changes.append(Progressed(job.job.request.id, done, job.rate))

        heapq.heappush(self._heap, (job.since + self._costs.measure, next(self._counter), report))

    def _share(self, guest: ActiveJob, host: ActiveJob) -> None:
        """Slow the host down, which shares its devices from now on; the guest's rate is set when it gets them."""
        guest.partner, host.partner = host, guest
        self._settle(host)
        self._set_rate(host, max(host.since, self.clock.now()))

    def _unshare(self, job: ActiveJob) -> None:
        """End sharing before a job loses its devices: its partner has them alone."""
        partner = job.partner
        assert partner is not None
        job.partner = partner.partner = None
        self._settle(partner)
        self._set_rate(partner, max(partner.since, self.clock.now()))

    def _rate(self, job: ActiveJob) -> float:
        request = job.job.request
        rate = self._throughput.rate(request, self.fleet.count(job.devices))
        if self._costs.spread:
            size = max(node.count for node in self.fleet.nodes)
            extra = self.fleet.spread(job.devices) - -(-len(job.devices) // size)
            rate *= max(0.25, 1.0 - self._costs.spread * extra)
        return rate if job.partner is None else rate * self._costs.sharing
