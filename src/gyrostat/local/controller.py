"""Keeps every job where the scheduler has placed it and in the state its owner wants. For the loop's thread only.

Inputs are the scheduler's plans (`place`), requests of owners (`owner_changed`), messages of drivers (`host_gone`,
`status_seen`) and time (`check_time`). Outputs are commands to drivers, records in the registry, and `changes`
for the scheduler's next snapshot. Which jobs exist and in what state is in the registry; here is what the scheduler knows
of them, and their drivers.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator

from gyrostat.cluster.eviction import GRACE_S
from gyrostat.cluster.layout import ClusterLayout
from gyrostat.cluster.next_state import next_state_of
from gyrostat.cluster.occupancy import Occupancy
from gyrostat.cluster.records import Intent, JobRecord, JobState
from gyrostat.cluster.registry import Registry
from gyrostat.core.checkpoint_names import newest_step
from gyrostat.core.devices import Devices
from gyrostat.core.errors import StorageFull, UsageError
from gyrostat.core.phase import JobPhase
from gyrostat.core.plan import Plan, Preempt, Resize, Start
from gyrostat.core.plural import plural_range
from gyrostat.core.request import JobId
from gyrostat.job.control.requests import Status
from gyrostat.local.driver import Driver
from gyrostat.local.driver_messages import DriverMessage, HostGone
from gyrostat.local.home import Home
from gyrostat.local.host_files import CHECKPOINTS, is_hosted, last_sign_of_life, read_result
from gyrostat.local.host_pool import HostPool
from gyrostat.local.tracked import TrackedJob, bound
from gyrostat.sched.port import Change, Finished, Submitted
from gyrostat.sched.state import SchedulerState

CANCEL_S = 10.0
"""How long a job that is cancelled may take to stop, before it is killed."""
_KINDS = {Start: "started", Resize: "resized", Preempt: "preempted"}
_SURROUNDINGS = (OSError, sqlite3.Error, StorageFull, MemoryError)
"""Failures that are no job's fault."""
logger = logging.getLogger(__name__)


class JobController:
    def __init__(
        self,
        home: Home,
        registry: Registry,
        layout: ClusterLayout,
        pool: HostPool,
        post: Callable[[DriverMessage], None],
        *,
        grace: float = GRACE_S,
    ) -> None:
        """`post`: how drivers, in their own threads, reach the loop's thread. `grace`: seconds in which a job leaves devices
        that the scheduler takes from it, also if its owner pauses it or the daemon ends."""
        self._home, self._registry, self._layout, self._pool, self._post = home, registry, layout, pool, post
        self._created, self._grace = registry.store.born, grace
        self.occupancy = Occupancy(self._wake_drivers)
        self.changes: list[Change] = []
        """For the scheduler's next snapshot."""
        self._jobs: dict[str, TrackedJob] = {}
        self._timed: set[str] = set()
        """Jobs with a time limit, or that wait until a certain time."""
        self._unconfirmed: set[str] = set()
        """Jobs that were submitted to the scheduler anew: they may have devices that it does not assign to them again."""

    def drivers(self) -> dict[str, Driver]:
        return {id_: job.driver for id_, job in self._jobs.items() if job.driver is not None}

    # After a start of the daemon.

    def recover(self) -> None:
        """Adopt jobs that run, restart those that ended without a daemon, and queue those that wait."""
        living = [record for record in self._registry.jobs() if not record.state.over]
        hosted = {record.id for record in living if is_hosted(self._home.job(record.id))}
        for record in living:  # all before any job is started: their devices are taken
            with self.isolated(record.id):
                job = self._track(record)
                job.verdict = record.defect
                if record.id in hosted:
                    job.driver = self._driver(record)
                    job.driver.adopt()
                    self._registry.note("adopted", "found running", record, after=record.devices)
        for record in living:
            if (tracked := self._jobs.get(record.id)) is not None:
                driver = tracked.driver
                with self.isolated(record.id):
                    self._recover(record, tracked)
                if driver is not None:
                    driver.start()

    def _recover(self, record: JobRecord, job: TrackedJob) -> None:
        if job.verdict is not None:
            self._stop_for_good(record, job)
        elif job.driver is not None:
            self._adopt(record, job, job.driver)
        elif record.holds_devices:
            now, wrote = self._registry.clock(), last_sign_of_life(self._home.job(record.id))
            # It is taken to have had its devices until it last wrote to a file.
            ran = record.ran if wrote is None else record.ran_by(min(now, wrote))
            self._registry.progress(record.id, ran=ran, changed=now)
            result = read_result(self._home.job(record.id), record.attempts)
            self.host_gone(HostGone(record.id, record.attempts, result))
            if record.id in self._jobs:
                self.owner_changed(self._registry.get(record.id))
        else:
            self.owner_changed(record)

    def _adopt(self, record: JobRecord, job: TrackedJob, driver: Driver) -> None:
        """It runs: bind it to the devices it should have, or to those it is on if it should have none."""
        if record.intent is not Intent.RUN:
            self.owner_changed(record)
            return
        existing = range(len(self._layout.fleet))  # the cluster may have other devices than before
        devices = tuple(device for device in record.devices or driver.actual if device in existing)
        self._submit(record, job)
        if job.request is not None:
            self.changes += bound(
                job.request, devices, devices if record.spec.opportunistic else record.borrowed
            )
            job.devices = devices
            self._unconfirmed.add(record.id)
        self.occupancy.entitle(record.id, job.devices)
        job.retarget(self._grace)

    # The scheduler's decisions.

    def place(self, plan: Plan) -> None:
        """All entitlements first: no job takes a device before its holder knows that it must leave."""
        for action in plan.actions:
            job = self._jobs[action.job]
            job.devices = () if isinstance(action, Preempt) else action.devices
            job.rate.reset()
            self.occupancy.entitle(action.job, job.devices)
        for action in plan.actions:
            borrowed = () if isinstance(action, Preempt) else action.borrowed
            with self.isolated(action.job):
                devices = self._jobs[action.job].devices
                self._assign(action.job, _KINDS[type(action)], action.reason, devices, borrowed=borrowed)

    def confirm(self, state: SchedulerState) -> None:
        """After a plan: jobs leave devices that the scheduler does not assign to them."""
        for id_ in self._unconfirmed & self._jobs.keys():
            view = state.jobs.get(JobId(id_))
            held = () if view is None else tuple(sorted((*view.devices, *view.borrowed)))
            if held != self._jobs[id_].devices:
                with self.isolated(id_):
                    self._keep(id_, held)
        self._unconfirmed.clear()

    def resubmissions(self) -> dict[JobId, tuple[Change, ...]]:
        """All jobs that a new scheduler has to know, with the devices that they have. `changes` for the old one are void."""
        self.changes.clear()
        self._unconfirmed |= {id_ for id_, job in self._jobs.items() if job.devices}
        return {
            job.request.id: (
                Submitted(job.request),
                *bound(job.request, job.devices, self._registry.get(id_).borrowed),
            )
            for id_, job in self._jobs.items()
            if job.request is not None
        }

    # Failures of the daemon itself.

    @contextlib.contextmanager
    def isolated(self, id_: str) -> Iterator[None]:
        """What fails in the block fails because of this job: the job is set aside, and the loop goes on."""
        try:
            yield
        except _SURROUNDINGS:
            raise
        except Exception as error:
            self.set_aside(id_, error)

    def set_aside(self, id_: str, error: Exception) -> None:
        """The daemon cannot handle this job. It checkpoints, stops and fails with this error; others are not affected."""
        logger.error("the scheduling loop failed on a job", exc_info=error, extra={"job": id_})
        record = self._registry.get(id_)
        if record.state.over:
            return
        job = self._jobs.setdefault(id_, TrackedJob())
        again, job.verdict = job.verdict is not None, f"the scheduler failed on it: {error!r}"
        if not again:
            with self.isolated(id_):
                self._stop_for_good(record, job)
            return
        # It could not even be stopped in order: its host goes on until it ends, and its devices are free for others.
        del self._jobs[id_]
        self._timed.discard(id_)
        self._leave_scheduler(id_, job)
        self._close_driver(job)
        now = self._registry.clock()
        self._registry.move(id_, JobState.FAILED, job.verdict, "failed", devices=(), finished=now)

    def _stop_for_good(self, record: JobRecord, job: TrackedJob) -> None:
        """With the job's verdict."""
        self._leave_scheduler(record.id, job)
        if job.driver is not None:
            job.retarget(self._grace)
        else:
            self.host_gone(HostGone(record.id, record.attempts, None))

    def _keep(self, id_: str, devices: Devices) -> None:
        """It keeps only these, without a plan: its owner has decided, or the cluster has other devices."""
        self._jobs[id_].devices = devices
        self.occupancy.entitle(id_, devices)
        spec = self._registry.get(id_).spec
        reason = f"it may have {plural_range(spec.min, spec.largest, 'device')}, and keeps these"
        self._assign(id_, "resized", reason, devices)

    def _assign(self, id_: str, kind: str, reason: str, devices: Devices, **fields: Devices) -> None:
        """Record where the job should be, then have its driver bring it there."""
        record, job = self._registry.get(id_), self._jobs[id_]
        logger.info("%s: devices %s after %s: %s", kind, devices, record.devices, reason, extra={"job": id_})
        self._registry.move(id_, None, reason, kind, before=record.devices, devices=devices, **fields)
        if job.driver is None and devices:
            job.driver = self._driver(record)
            job.driver.start()
        job.reason = reason
        job.retarget(self._grace)

    # Requests of owners.

    def owner_changed(self, record: JobRecord) -> None:
        """The job is new, or its owner has requested something."""
        if record.state.over:
            return
        job = self._track(record)
        if record.intent is not Intent.RUN:
            self._leave_scheduler(record.id, job)
            if job.driver is not None:
                job.retarget(CANCEL_S if record.intent is Intent.CANCEL else self._grace)
            else:
                self.host_gone(HostGone(record.id, record.attempts, None))
        elif job.request is not None:
            self._resubmit(record, job)
        elif job.driver is None and job.verdict is None:
            if record.state is JobState.PAUSED:
                back = JobState.SUSPENDED if record.attempts else JobState.QUEUED
                record = self._registry.move(record.id, back, "resumed by its owner")
            if (record.not_before or 0.0) <= self._registry.clock():
                self._submit(record, job)

    def _submit(self, record: JobRecord, job: TrackedJob) -> None:
        try:
            age = record.submitted - self._created
            job.request = self._layout.request(record.id, record.spec, record.vc, age)
        except UsageError as error:  # the cluster has other devices than when the job was accepted
            self._registry.move(record.id, None, f"it cannot run here: {error}", not_before=None)
            return
        self.changes.append(Submitted(job.request))

    def _resubmit(self, record: JobRecord, job: TrackedJob) -> None:
        """Its owner has changed its size: for the scheduler it is a new job, bound to the devices it may keep."""
        before = job.request
        assert before is not None
        after = self._layout.request(record.id, record.spec, record.vc, before.submitted)
        if after == before:
            return
        job.request = after
        self.changes += [Finished(before.id), Submitted(after)]
        kept = job.devices[: after.largest]
        if len(kept) < after.smallest:
            self._unconfirmed.add(record.id)  # it leaves what it has, unless the next plan gives it more
        elif kept:
            self.changes += bound(after, kept, record.borrowed)
        if kept != job.devices:
            self._keep(record.id, kept)

    def _leave_scheduler(self, id_: str, job: TrackedJob) -> None:
        if job.request is not None:
            self.changes.append(Finished(job.request.id))
            job.request = None
        job.devices = ()
        self.occupancy.entitle(id_, ())

    # Messages of drivers.

    def status_seen(self, id_: str, status: Status) -> None:
        if (job := self._jobs.get(id_)) is None:
            return  # it is over
        record = self._registry.get(id_)
        self._registry.progress(
            id_,
            step=status.step if status.phase is JobPhase.TRAINING else record.step,
            loss=status.loss if status.loss is not None else record.loss,
            throughput=status.throughput,
            workers=status.workers,
            servers=len(status.servers or ()),
        )
        if status.phase is not JobPhase.TRAINING:
            return
        if record.state is JobState.STARTING:
            self._registry.move(id_, JobState.RUNNING, None, "running")
        self.changes += job.progressed(status.step, time.monotonic())

    def host_gone(self, ended: HostGone) -> None:
        """No host has the job any more, or none had and its owner does not want it to run."""
        job = self._jobs.get(ended.job)
        if job is None or (job.devices and not ended.began):
            return  # it is over, or has devices again
        record, result = self._registry.get(ended.job), ended.result
        if not ended.began and record.intent is Intent.RUN and job.verdict is None:
            self._requeue(record, job)
            return
        checkpoint = newest_step(self._home.job(record.id) / CHECKPOINTS)
        reached = max(record.step, result.step if result is not None else 0)
        if result is not None and result.started and record.state is JobState.STARTING:
            # It trained between two statuses.
            record = self._registry.move(record.id, JobState.RUNNING, None, "running")
        died = result is None and record.holds_devices and ended.evicted is None
        deaths = 0 if result is not None or reached > job.died_at else job.deaths
        job.deaths, job.died_at = deaths + died, reached
        after = next_state_of(
            record,
            result,
            entitled=bool(job.devices),
            verdict=job.verdict,
            deaths=job.deaths,
            checkpoint=checkpoint,
            evicted=ended.evicted,
        )
        step = reached if after.state.over else checkpoint or 0  # what it goes on from
        if after.leaves:
            self._leave_scheduler(record.id, job)
        if not job.devices:
            self._close_driver(job)
        now = self._registry.clock()
        record = self._registry.move(
            record.id,
            after.state,
            after.reason,
            after.kind,
            before=record.devices,
            devices=job.devices,
            borrowed=record.borrowed if job.devices else (),
            finished=now if after.state.over else None,
            not_before=None if after.after is None else now + after.after,
            workers=0,
            throughput=None,
            **{"step": step, "loss": record.loss if step == reached else None, **after.fields},
        )
        if after.after is not None:
            self._timed.add(record.id)
        if after.state.over:
            del self._jobs[record.id]
            self._timed.discard(record.id)
        elif job.driver is not None:
            job.reason = after.reason
            job.driver.retarget(job.devices, within=self._grace, restart=True)
        elif after.state is JobState.PAUSED and record.intent is Intent.RUN:
            self.owner_changed(record)  # resumed meanwhile

    def _requeue(self, record: JobRecord, job: TrackedJob) -> None:
        """It lost its devices before it could be started on them."""
        self._close_driver(job)
        state = JobState.SUSPENDED if record.holds_devices else None
        self._registry.move(record.id, state, None, devices=(), borrowed=(), workers=0)

    # Drivers.

    def _track(self, record: JobRecord) -> TrackedJob:
        if record.id not in self._jobs:
            self._jobs[record.id] = TrackedJob()
            if record.spec.time_limit is not None or record.not_before is not None:
                self._timed.add(record.id)
        return self._jobs[record.id]

    def _driver(self, record: JobRecord) -> Driver:
        return Driver(
            record.id,
            self._home.job(record.id),
            self._home.sockets,
            spec=lambda: self._registry.get(record.id).spec,
            beneath=record.beneath,
            attempt=record.attempts,
            slot=self._layout.slot,
            occupancy=self.occupancy,
            pool=self._pool,
            begin=lambda attempt: self._begin(record.id, attempt),
            post=self._post,
        )

    def _begin(self, id_: str, attempt: int) -> None:
        """In the driver's thread: the record of an attempt is durable before a host has it."""
        started, job = self._registry.get(id_).started, self._jobs.get(id_)
        self._registry.move(
            id_,
            JobState.STARTING,
            None if job is None else job.reason,
            attempts=attempt,
            started=self._registry.clock() if started is None else started,
            not_before=None,
        )

    def _close_driver(self, job: TrackedJob) -> None:
        """In another thread: its own may be waiting for a job's answer."""
        if job.driver is not None:
            threading.Thread(target=job.driver.close, name=f"end of driver {job.driver.job}").start()
            job.driver = None

    def _wake_drivers(self) -> None:
        for job in list(self._jobs.values()):
            if (driver := job.driver) is not None:
                driver.wake()

    # Time.

    def check_time(self) -> None:
        """End jobs at their time limits, and submit those that have waited long enough after a failure."""
        now = self._registry.clock()
        for id_ in list(self._timed):
            with self.isolated(id_):
                self._check_time(self._registry.get(id_), self._jobs[id_], now)

    def _check_time(self, record: JobRecord, job: TrackedJob, now: float) -> None:
        limit = record.spec.time_limit
        if limit is not None and record.ran_by(now) >= limit and job.verdict is None:
            job.verdict = f"its time limit of {limit:g} s with devices is over"
            self._stop_for_good(record, job)
        elif job.request is None and record.not_before is not None and record.not_before <= now:
            self.owner_changed(record)

    def next_time(self) -> float | None:
        """Seconds until `check_time` has something to do."""
        now = self._registry.clock()
        times = [self._jobs[id_].next_time(self._registry.get(id_), now) for id_ in self._timed]
        return min((time for time in times if time is not None), default=None)

    # The end.

    def stop_all(self) -> None:
        """All jobs checkpoint and stop; they wait for the next daemon."""
        for id_, driver in self.drivers().items():
            self._jobs[id_].devices = ()
            self.occupancy.entitle(id_, ())
            driver.retarget((), within=self._grace)
