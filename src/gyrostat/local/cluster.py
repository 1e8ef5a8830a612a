"""The cluster on this machine, behind the port of the scheduling loop (`sched.port.Cluster`).

    observe   what has changed since the last snapshot: submissions, requests of owners, jobs that ended
    apply     the plan: which job should have which devices (`controller`)
    wait      until something changes. Messages of drivers and questions are handled here, between two rounds

All decisions about jobs are made in the loop's thread; drivers and the service (through `backend`) post to its `inbox`.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from gyrostat.cluster.eviction import GRACE_S
from gyrostat.cluster.layout import ClusterLayout
from gyrostat.cluster.occupancy import Occupancy
from gyrostat.cluster.registry import Registry
from gyrostat.core.errors import StorageFull
from gyrostat.core.plan import Plan
from gyrostat.local.controller import JobController
from gyrostat.local.driver_messages import (
    DriverTrouble,
    HostGone,
    JobBlocked,
    JobEvicted,
    JobMoved,
    MoveFailed,
    ServersScaled,
    StatusSeen,
)
from gyrostat.local.home import Home
from gyrostat.local.host_pool import HostPool
from gyrostat.local.inbox import ClusterInbox, JobChanged, Message, Reserve
from gyrostat.local.job_events import JobEvents
from gyrostat.sched.faults import jobs_at_fault
from gyrostat.sched.port import Snapshot, Withdrawn
from gyrostat.sched.state import SchedulerState

_KILLED_S = 30.0
"""After the grace, until a job that is killed has ended."""
_REST, _LONGEST_REST_S = 3.0, 0.25
"""After a round the loop rests this many times as long as the round took: a thousand submissions at once do not wait for a
scheduler that reads the whole queue after each."""


T = TypeVar("T")


class Closed(Exception):
    """The daemon ends: the loop is over."""


class LocalCluster:
    """Implements `sched.port.Cluster`."""

    def __init__(
        self,
        home: Home,
        registry: Registry,
        layout: ClusterLayout,
        scheduler_state: SchedulerState,
        pool: HostPool,
        *,
        grace: float = GRACE_S,
    ) -> None:
        """`grace`: seconds in which a job leaves devices that are taken from it."""
        self._registry, self._scheduler_state, self._grace = registry, scheduler_state, grace
        self._inbox, self._events = ClusterInbox(), JobEvents(home, registry, grace)
        self._controller = JobController(home, registry, layout, pool, self._inbox.post, grace=grace)
        self._began = registry.clock() - registry.store.born, time.monotonic()
        """The cluster's age when this daemon started, and when that was."""
        self._recovered = False
        self._round_began = time.monotonic()
        self._due: deque[JobChanged | HostGone] = deque()
        """Messages that need a scheduling round."""
        self._reserved: Mapping[str, int] = {}
        self._reserve: Mapping[str, int] | None = registry.store.reservations() or None
        """Reservations that the scheduler does not know yet."""

    # The port.

    def observe(self) -> Snapshot:
        self._round_began = time.monotonic()
        self._receive()
        now = self._now()
        if not self._recovered:
            self._recovered = True
            for record in self._registry.jobs():
                if not record.state.over:
                    self._events.record_incidents(record.id)
            self._controller.recover()
        while self._due:  # one that cannot be handled now, because the disk fails, is due again
            with self._controller.isolated(self._due[0].job):
                match self._due[0]:
                    case HostGone() as message:
                        self._controller.host_gone(message)
                    case JobChanged(job):
                        self._controller.owner_changed(self._registry.get(job))
            self._due.popleft()
        self._controller.check_time()
        changes, self._controller.changes = self._controller.changes, []
        if self._reserve is not None:
            for type_ in {**self._reserved, **self._reserve}:
                changes.append(Withdrawn(type_, self._reserve.get(type_, 0)))
            self._reserved, self._reserve = self._reserve, None
        return Snapshot(now, tuple(changes))

    def apply(self, plan: Plan) -> None:
        self._controller.place(plan)

    def wait(self, until: float | None) -> None:
        self._controller.confirm(self._scheduler_state)
        self._keep_measurements()
        now = time.monotonic()
        rested = now + min(_REST * (now - self._round_began), _LONGEST_REST_S)
        while True:
            if self._inbox.is_closing:
                raise Closed
            self._receive()
            if self._reserve is not None:
                return
            self._answer()
            times = [until - self._now()] if until is not None else []
            if (own := self._controller.next_time()) is not None:
                times.append(own)
            left = min(times, default=None)
            due = bool(self._due or self._controller.changes) or (left is not None and left <= 0)
            rest = rested - time.monotonic()
            if due and rest <= 0:
                return
            self._inbox.wait(rest if due else left)

    def _keep_measurements(self) -> None:
        """What jobs measured is kept for later jobs, also of a later daemon. A full disk costs no more than that."""
        fresh = self._scheduler_state.estimates.fresh
        if fresh:
            with contextlib.suppress(StorageFull):
                self._registry.store.observe(fresh)
            fresh.clear()

    def restart_scheduler(self, build: Callable[[], SchedulerState]) -> SchedulerState:
        """After a round that failed: a new scheduler gets all jobs again, without those that it fails on.

        These are set aside. Raises what a scheduler without any job raises.
        """
        for id_, error in jobs_at_fault(build, self._controller.resubmissions(), self._now()).items():
            self._controller.set_aside(id_, error)
        if self._reserve is None:
            self._reserve = self._reserved or None
        self._reserved = {}
        self._scheduler_state = build()
        for changes in self._controller.resubmissions().values():
            self._controller.changes += changes
        return self._scheduler_state

    def _receive(self) -> None:
        for message in self._inbox.take():
            self._handle(message)

    def _answer(self) -> None:
        for answer in self._inbox.take_questions():
            answer(self._scheduler_state)

    def _handle(self, message: Message) -> None:
        """What needs no scheduling round is handled at once."""
        match message:
            case StatusSeen(job, status):
                with self._controller.isolated(job):
                    self._events.record_incidents(job)
                    self._controller.status_seen(job, status)
            case (
                JobMoved(job)
                | ServersScaled(job)
                | MoveFailed(job)
                | JobEvicted(job)
                | JobBlocked(job)
                | DriverTrouble(job)
            ):
                with self._controller.isolated(job):
                    self._events.note(message)
            case HostGone(job):
                with self._controller.isolated(job):
                    self._events.record_incidents(job)
                self._due.append(message)
            case JobChanged():
                self._due.append(message)
            case Reserve(devices):
                self._reserve = devices

    def _now(self) -> float:
        """Seconds since the cluster was first started; never goes back while the daemon lives."""
        age, began = self._began
        return age + time.monotonic() - began

    # For any thread.

    @property
    def occupancy(self) -> Occupancy:
        return self._controller.occupancy

    def enqueue(self, id_: str) -> None:
        """This job is new, or its owner has requested something."""
        self._inbox.post(JobChanged(id_))

    def reserve(self, devices: Mapping[str, int]) -> None:
        """Serving loads have these devices from now on, by type."""
        self._inbox.post(Reserve(dict(devices)))

    def ask(self, question: Callable[[SchedulerState], T]) -> T:
        """Have the loop's thread read the scheduler's state, between two rounds; waits for the answer."""
        return self._inbox.ask(question)

    def shut_down(self, checkpoint: bool) -> None:
        """End the loop; `close` does the rest. The first call decides whether jobs stop."""
        self._inbox.shut_down(checkpoint)

    @property
    def stops_jobs(self) -> bool:
        """Whether jobs are to stop with the daemon."""
        return self._inbox.checkpoints

    # The end.

    def close(self) -> None:
        """After the loop: stop jobs, if that was requested, then close all drivers."""
        self._receive()
        self._answer()
        drivers = self._controller.drivers()
        if self.stops_jobs:
            self._controller.stop_all()
            deadline = time.monotonic() + self._grace + _KILLED_S
            while any(driver.hosted for driver in drivers.values()) and time.monotonic() < deadline:
                self._inbox.wait_for_messages(0.05)
                self._receive()
                self._answer()
            self._receive()
            for message in self._due:
                if isinstance(message, HostGone):
                    self._controller.host_gone(message)
        for driver in self._controller.drivers().values():
            driver.close()
        self._receive()
