"""The cluster on this machine, behind the port of the one scheduling loop (`sched.port.Cluster`).

    observe   what happened since the last look: submissions, wishes of owners, jobs that ended (`_look_at`, `_ended`)
    apply     who should have which devices: noted for everybody first, then each job's `driver` is told
    wait      until something happens; questions about the scheduler's books are answered here, where they are at rest

All that is decided about jobs is decided in the loop's thread. Drivers and the office (through `desk`) post to its inbox.
What jobs there are, and in what state, is the registry's; here is only what the scheduler has been told of them, and who
drives them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from gyrostat.cluster.layout import ClusterLayout
from gyrostat.cluster.next_state import fate_of
from gyrostat.cluster.occupancy import Occupancy
from gyrostat.cluster.records import Intent, JobRecord, JobState
from gyrostat.cluster.registry import Registry
from gyrostat.core.devices import Devices
from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.core.phase import JobPhase
from gyrostat.core.plan import Plan, Preempt, Resize, Start
from gyrostat.core.request import JobId, JobRequest
from gyrostat.job.control.control_socket import Status
from gyrostat.local.driver import (
    AttemptBegan,
    Driver,
    DriverTrouble,
    HostGone,
    JobMoved,
    MoveFailed,
    News,
    StatusSeen,
)
from gyrostat.local.home import Home
from gyrostat.local.host_files import is_hosted, last_sign_of_life, read_result
from gyrostat.local.host_pool import HostPool
from gyrostat.sched.port import Bound, Change, Finished, Progressed, Snapshot, Submitted, Withdrawn
from gyrostat.sched.state import SchedulerState

CANCEL_S = 10.0
"""For which a job that is cancelled may take to leave, before it is killed."""
STOP_S = 600.0
"""For which one that has to leave may take to reach a boundary and checkpoint."""
_SLACK_S = 30.0
"""After that time, until one that is killed is gone."""
_REPORT_S = 5.0
"""How often the scheduler hears how fast a job is."""
_REST, _LONGEST_REST_S = 3.0, 0.25
"""After a round the loop rests so many times as long as that took: who submits a thousand jobs at once does not wait for a
scheduler that looks at the whole queue after each."""


T = TypeVar("T")


class Closed(Exception):
    """The daemon ends: the loop is over."""


@dataclass
class _Tracked:
    """A job that has not ended."""

    driver: Driver | None = None
    """None: it is on no device, and should be on none."""
    request: JobRequest | None = None
    """As the scheduler knows it; None: it does not, for the job is paused, or waits before it is tried again."""
    devices: Devices = ()
    """What the scheduler has decided that it has."""
    verdict: str | None = None
    """Why it is made to stop for good."""
    deaths: int = 0
    """How often its host was killed and it had come no farther than `died_at`."""
    died_at: int = -1
    seen: tuple[float, int] | None = None
    """When it was first seen at which step, since it was last reported."""


class LocalCluster:
    """Implements `sched.port.Cluster`."""

    def __init__(
        self,
        home: Home,
        registry: Registry,
        layout: ClusterLayout,
        scheduler_state: SchedulerState,
        pool: HostPool,
    ) -> None:
        self._home, self._registry, self._layout, self._scheduler_state, self._pool = (
            home,
            registry,
            layout,
            scheduler_state,
            pool,
        )
        self.occupancy = Occupancy(self._ring_all)
        self._born = registry.store.born
        self._began = registry.clock() - self._born, time.monotonic()
        self._changed = threading.Condition()
        self._inbox: deque[str | HostGone | Progressed] = deque()
        self._questions: deque[Callable[[], None]] = deque()
        self._closing = self._checkpoint = False
        self._tracked: dict[str, _Tracked] = {}
        self._timed: set[str] = set()
        """Jobs with a time limit, or that wait until a certain time."""
        self._doubtful: set[str] = set()
        """Jobs of which it is not sure that they keep what they have: the scheduler was told of them anew."""
        self._first_look = True
        self._looked_at = time.monotonic()
        self._reserved: dict[str, int] = {}
        self._withdraw: dict[str, int] | None = registry.store.reservations() or None
        self._changes: list[Change] = []

    # The port.

    def observe(self) -> Snapshot:
        self._looked_at = time.monotonic()
        with self._changed:
            inbox = list(self._inbox)
            self._inbox.clear()
            withdraw, self._withdraw = self._withdraw, None
        now = self._now()
        if self._first_look:
            self._first_look = False
            self._recover()
        for item in inbox:
            match item:
                case HostGone():
                    self._ended(item)
                case Progressed():
                    if (tracked := self._tracked.get(item.job)) is not None and tracked.request is not None:
                        self._changes.append(item)
                case id_:
                    self._look_at(self._registry.get(id_))
        self._keep_time()
        if withdraw is not None:
            for type_ in {**self._reserved, **withdraw}:
                self._changes.append(Withdrawn(type_, withdraw.get(type_, 0)))
            self._reserved = withdraw
        changes, self._changes = tuple(self._changes), []
        return Snapshot(now, changes)

    def apply(self, plan: Plan) -> None:
        """Everybody's entitlement first: nobody takes what another has yet to learn that it must leave."""
        for action in plan.actions:
            tracked = self._tracked[action.job]
            tracked.devices = () if isinstance(action, Preempt) else action.devices
            tracked.seen = None
            self.occupancy.entitle(action.job, tracked.devices)
        for action in plan.actions:
            record = self._registry.get(action.job)
            match action:
                case Start():
                    kind, borrowed = "started", action.borrowed
                case Resize():
                    kind, borrowed = "resized", action.borrowed
                case Preempt():
                    kind, borrowed = "preempted", ()
            tracked = self._tracked[action.job]
            devices = tracked.devices
            self._registry.move(
                action.job,
                None,
                action.reason,
                kind,
                before=record.devices,
                devices=devices,
                borrowed=borrowed,
            )
            self._aim(record, tracked, STOP_S)

    def wait(self, until: float | None) -> None:
        self._believe_the_books()
        now = time.monotonic()
        rested = now + min(_REST * (now - self._looked_at), _LONGEST_REST_S)
        while True:
            with self._changed:
                if self._closing:
                    raise Closed
                times = [until] if until is not None else []
                if (own := self._next_time()) is not None:
                    times.append(own)
                left = min((at - self._now() for at in times), default=None)
                news = bool(self._inbox) or (left is not None and left <= 0)
                rest = rested - time.monotonic()
                if self._withdraw is not None or (news and rest <= 0):
                    return
                if not self._questions:
                    self._changed.wait(rest if news else left)
                    continue
                questions, self._questions = list(self._questions), deque()
            for question in questions:
                question()

    # What happened.

    def _recover(self) -> None:
        """The daemon was started: jobs that run are taken back, those that died meanwhile go on, those that wait wait again."""
        living = [record for record in self._registry.jobs() if not record.state.over]
        hosted = {record.id for record in living if is_hosted(self._home.job(record.id))}
        for (
            record
        ) in living:  # all of them before anybody is started: nobody may sit down where one of them is
            tracked = self._track(record)
            if record.id in hosted:
                tracked.driver = self._driver(record)
                tracked.driver.adopt()
                self._registry.note("adopted", "found running by a new daemon", record, after=record.devices)
        for record in living:
            tracked = self._tracked[record.id]
            if tracked.driver is not None:
                self._take_back(record, tracked)
                tracked.driver.start()
            elif record.holds_devices:
                self._count_to_last_sign(record)
                result = read_result(self._home.job(record.id), record.attempts)
                self._ended(HostGone(record.id, record.attempts, result))
                if record.id in self._tracked:
                    self._look_at(self._registry.get(record.id))
            else:
                self._look_at(record)

    def _count_to_last_sign(self, record: JobRecord) -> None:
        """It left its devices while no daemon looked, perhaps with the whole machine: it had them until it last wrote."""
        now, wrote = self._registry.clock(), last_sign_of_life(self._home.job(record.id))
        ran = record.ran if wrote is None else record.ran_by(min(now, wrote))
        self._registry.progress(record.id, ran=ran, changed=now)

    def _take_back(self, record: JobRecord, tracked: _Tracked) -> None:
        """It runs. The scheduler is told where it should be, or where it is if it should be nowhere."""
        assert tracked.driver is not None
        if record.intent is not Intent.RUN:
            self._look_at(record)
            return
        there = range(len(self._layout.fleet))  # the cluster may be another than before
        devices = tuple(device for device in record.devices or tracked.driver.actual if device in there)
        self._submit(record, tracked)
        if tracked.request is not None:
            if tracked.request.smallest <= len(devices) <= tracked.request.largest:
                borrowed = tuple(d for d in devices if record.spec.opportunistic or d in record.borrowed)
                own = tuple(device for device in devices if device not in borrowed)
                self._changes.append(Bound(tracked.request.id, own, borrowed))
            tracked.devices = devices
            self._doubtful.add(record.id)
        self.occupancy.entitle(record.id, tracked.devices)
        self._aim(record, tracked, STOP_S)

    def _look_at(self, record: JobRecord) -> None:
        """It is new, or its owner wants something of it."""
        if record.state.over:
            return
        tracked = self._track(record)
        if record.intent is not Intent.RUN:
            self._leave_scheduler(record.id, tracked)
            if tracked.driver is not None:
                self._aim(record, tracked, CANCEL_S if record.intent is Intent.CANCEL else STOP_S)
            else:
                self._ended(HostGone(record.id, record.attempts, None))
        elif tracked.request is not None:
            self._reconsider(record, tracked)
        elif tracked.driver is None and tracked.verdict is None:
            if record.state is JobState.PAUSED:
                back = JobState.SUSPENDED if record.attempts else JobState.QUEUED
                record = self._registry.move(record.id, back, "resumed by its owner")
            if (record.not_before or 0.0) <= self._registry.clock():
                self._submit(record, tracked)

    def _submit(self, record: JobRecord, tracked: _Tracked) -> None:
        try:
            request = self._layout.request(record.id, record.spec, record.vc, record.submitted - self._born)
        except UsageError as error:  # the cluster is another than when it was accepted
            self._registry.move(record.id, None, f"it cannot run here: {error}", not_before=None)
            return
        tracked.request = request
        self._changes.append(Submitted(request))

    def _reconsider(self, record: JobRecord, tracked: _Tracked) -> None:
        """Its owner has changed what it asks for: the scheduler hears of a new job, which has what it may keep."""
        before = tracked.request
        assert before is not None
        after = self._layout.request(record.id, record.spec, record.vc, before.submitted)
        if after == before:
            return
        tracked.request = after
        self._changes += [Finished(before.id), Submitted(after)]
        kept = tracked.devices[: after.largest]
        if len(kept) < after.smallest:
            self._doubtful.add(record.id)  # it leaves what it has, unless it is given something at once
        elif kept:
            borrowed = tuple(device for device in kept if device in record.borrowed)
            own = tuple(device for device in kept if device not in borrowed)
            self._changes.append(Bound(after.id, own, borrowed))
        if kept != tracked.devices:
            self._put(record, tracked, kept)

    def _believe_the_books(self) -> None:
        """The scheduler has decided: what it does not know that a job has, the job has not."""
        for id_ in self._doubtful & self._tracked.keys():
            tracked = self._tracked[id_]
            view = self._scheduler_state.jobs.get(JobId(id_))
            held = () if view is None else tuple(sorted((*view.devices, *view.borrowed)))
            if held != tracked.devices:
                self._put(self._registry.get(id_), tracked, held)
        self._doubtful.clear()

    def _put(self, record: JobRecord, tracked: _Tracked, devices: Devices) -> None:
        """Not by a plan: its owner has decided, or the cluster is another."""
        tracked.devices = devices
        self.occupancy.entitle(record.id, devices)
        reason = f"it may have {record.spec.min} to {record.spec.largest} devices, and these are left to it"
        self._registry.move(record.id, None, reason, "resized", before=record.devices, devices=devices)
        self._aim(record, tracked, STOP_S)

    def _ended(self, ended: HostGone) -> None:
        """Nobody hosts a job any more, or nobody did and its owner does not want it to run."""
        tracked = self._tracked.get(ended.job)
        if tracked is None or (tracked.devices and not ended.began):
            return  # it is over, or is to be started again
        record, result = self._registry.get(ended.job), ended.result
        if not ended.began and record.intent is Intent.RUN and tracked.verdict is None:
            self._wait_again(record, tracked)
            return
        step = max(record.step, result.step if result is not None else 0)
        if result is not None and result.started and record.state is JobState.STARTING:
            # It trained from one look to the next.
            record = self._registry.move(record.id, JobState.RUNNING, None, "running")
        died = result is None and record.holds_devices
        tracked.deaths = 0 if result is not None or step > tracked.died_at else tracked.deaths
        tracked.deaths, tracked.died_at = tracked.deaths + died, step
        next_state = fate_of(
            record,
            result,
            entitled=bool(tracked.devices),
            verdict=tracked.verdict,
            deaths=tracked.deaths,
        )
        if next_state.leaves:
            self._leave_scheduler(record.id, tracked)
        if not tracked.devices and tracked.driver is not None:
            self._dismiss(tracked.driver)
            tracked.driver = None
        now = self._registry.clock()
        self._registry.move(
            record.id,
            next_state.state,
            next_state.reason,
            next_state.kind,
            before=record.devices,
            devices=tracked.devices,
            borrowed=record.borrowed if tracked.devices else (),
            finished=now if next_state.state.over else None,
            not_before=None if next_state.after is None else now + next_state.after,
            workers=0,
            throughput=None,
            **{"step": step, **next_state.fields},
        )
        if next_state.after is not None:
            self._timed.add(record.id)
        if next_state.state.over:
            del self._tracked[record.id]
            self._timed.discard(record.id)
        elif tracked.driver is not None:
            tracked.driver.go_on(tracked.devices)
        elif next_state.state is JobState.PAUSED and self._registry.get(record.id).intent is Intent.RUN:
            self._look_at(self._registry.get(record.id))  # resumed meanwhile

    def _wait_again(self, record: JobRecord, tracked: _Tracked) -> None:
        """It lost its devices before it could be started on them."""
        if tracked.driver is not None:
            self._dismiss(tracked.driver)
            tracked.driver = None
        state = JobState.SUSPENDED if record.holds_devices else None
        self._registry.move(record.id, state, None, devices=(), borrowed=(), workers=0)

    def _leave_scheduler(self, id_: str, tracked: _Tracked) -> None:
        if tracked.request is not None:
            self._changes.append(Finished(tracked.request.id))
            tracked.request = None
        tracked.devices = ()
        self.occupancy.entitle(id_, ())

    # Who drives.

    def _track(self, record: JobRecord) -> _Tracked:
        if record.id not in self._tracked:
            self._tracked[record.id] = _Tracked()
            if record.spec.time_limit is not None or record.not_before is not None:
                self._timed.add(record.id)
        return self._tracked[record.id]

    def _aim(self, record: JobRecord, tracked: _Tracked, within: float) -> None:
        """Its driver sees to it that it gets where it should be."""
        if tracked.driver is None and tracked.devices:
            tracked.driver = self._driver(record)
            tracked.driver.start()
        if tracked.driver is not None:
            tracked.driver.aim(tracked.devices, within=None if tracked.devices else within)

    def _driver(self, record: JobRecord) -> Driver:
        return Driver(
            record.id,
            self._home.job(record.id),
            self._home.sockets,
            spec=lambda: self._registry.get(record.id).spec,
            attempt=record.attempts,
            slot=self._layout.slot,
            occupancy=self.occupancy,
            pool=self._pool,
            tell=self._hear,
        )

    def _dismiss(self, driver: Driver) -> None:
        threading.Thread(target=driver.close, name=f"end of driver {driver.job}").start()

    def _ring_all(self) -> None:
        for tracked in list(self._tracked.values()):
            if tracked.driver is not None:
                tracked.driver.ring()

    def _hear(self, news: News) -> None:
        """From a driver's thread."""
        match news:
            case AttemptBegan(job, attempt):
                record = self._registry.get(job)
                started = self._registry.clock() if record.started is None else record.started
                self._registry.move(
                    job, JobState.STARTING, None, attempts=attempt, started=started, not_before=None
                )
            case StatusSeen(job, status):
                self._saw(self._registry.get(job), status)
            case JobMoved(job, before, after, pause):
                text = f"on {len(after)} devices; training stood still for {pause:.0f} ms"
                self._registry.note("moved", text, self._registry.get(job), before, after)
            case MoveFailed(job, reason):
                self._registry.note("not moved", reason, self._registry.get(job))
            case DriverTrouble(job, reason):
                self._registry.note("trouble", reason, self._registry.get(job))
            case HostGone():
                self._post(news)

    def _saw(self, record: JobRecord, status: Status) -> None:
        training = status.phase is JobPhase.TRAINING
        self._registry.progress(
            record.id,
            step=max(record.step, status.step),
            loss=status.loss if status.loss is not None else record.loss,
            throughput=status.throughput,
            workers=status.workers,
        )
        if training and record.state is JobState.STARTING:
            self._registry.move(record.id, JobState.RUNNING, None, "running")
        self._report(record, status, training)

    def _report(self, record: JobRecord, status: Status, training: bool) -> None:
        """The scheduler hears now and then how far a job is and how fast, in steps."""
        tracked, now = self._tracked.get(record.id), time.monotonic()
        if tracked is None or tracked.request is None or not training:
            return
        if tracked.request.work is None and tracked.request.workload is None:
            return  # nobody asks
        if tracked.seen is None or status.step < tracked.seen[1]:
            tracked.seen = now, status.step
        elif now - tracked.seen[0] >= _REPORT_S and status.step > tracked.seen[1]:
            rate = (status.step - tracked.seen[1]) / (now - tracked.seen[0])
            tracked.seen = now, status.step
            self._post(Progressed(tracked.request.id, float(status.step), rate))

    def _post(self, item: str | HostGone | Progressed) -> None:
        with self._changed:
            self._inbox.append(item)
            self._changed.notify_all()

    # Time.

    def _keep_time(self) -> None:
        """Time limits, and jobs that have waited long enough after a failure."""
        now = self._registry.clock()
        for id_ in list(self._timed):
            record, tracked = self._registry.get(id_), self._tracked[id_]
            limit = record.spec.time_limit
            if limit is not None and record.ran_by(now) >= limit and tracked.verdict is None:
                tracked.verdict = f"its time limit of {limit:g} s with devices is over"
                self._leave_scheduler(id_, tracked)
                if tracked.driver is not None:
                    self._aim(record, tracked, STOP_S)
                else:
                    self._ended(HostGone(id_, record.attempts, None))
            elif tracked.request is None and record.not_before is not None and record.not_before <= now:
                self._look_at(record)

    def _next_time(self) -> float | None:
        """When `_keep_time` has something to do, on the scheduler's clock."""
        now, times = self._registry.clock(), []
        for id_ in self._timed:
            record, tracked = self._registry.get(id_), self._tracked[id_]
            if record.spec.time_limit is not None and record.holds_devices and tracked.verdict is None:
                times.append(now + record.spec.time_limit - record.ran_by(now))
            if tracked.request is None and record.not_before is not None:
                times.append(record.not_before)
        return min(times) - now + self._now() if times else None

    def _now(self) -> float:
        """Seconds since the cluster was born; never goes back while the daemon lives."""
        age, began = self._began
        return age + time.monotonic() - began

    # From any thread.

    def look_at(self, id_: str) -> None:
        """This job is new, or its owner wants something of it."""
        self._post(id_)

    def withdraw(self, wanted: Mapping[str, int]) -> None:
        """A serving load has so many devices of each type from now on."""
        with self._changed:
            self._withdraw = dict(wanted)
            self._changed.notify_all()

    def ask(self, question: Callable[[SchedulerState], T]) -> T:
        """Have the loop's thread look at the books, when nothing is being decided."""
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                answer.set_result(question(self._scheduler_state))
            except BaseException as error:
                answer.set_exception(error)

        with self._changed:
            if self._closing:
                raise GyrostatError("the cluster is being shut down")
            self._questions.append(reply)
            self._changed.notify_all()
        return answer.result(timeout=30.0)

    # The end.

    def shut_down(self, checkpoint: bool) -> None:
        """The loop ends; `close` does the rest. Who says so first decides whether jobs stop with it."""
        with self._changed:
            if not self._closing:
                self._closing, self._checkpoint = True, checkpoint
            self._changed.notify_all()

    def close(self) -> None:
        """After the loop: jobs checkpoint and stop, if that was asked for, and nobody is driven any more."""
        drivers = {
            id_: tracked.driver for id_, tracked in self._tracked.items() if tracked.driver is not None
        }
        for question in self._questions:
            question()
        if self._checkpoint:
            for id_ in drivers:
                self.occupancy.entitle(id_, ())
            for driver in drivers.values():
                driver.aim((), within=STOP_S)
            deadline = time.monotonic() + STOP_S + _SLACK_S
            while any(driver.hosted for driver in drivers.values()) and time.monotonic() < deadline:
                with self._changed:
                    self._changed.wait(0.05)
            for item in list(self._inbox):
                if isinstance(item, HostGone):
                    self._tracked[item.job].devices = ()
                    self._ended(item)
        for tracked in self._tracked.values():
            if tracked.driver is not None:
                tracked.driver.close()
