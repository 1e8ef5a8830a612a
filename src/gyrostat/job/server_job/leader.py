"""Leads a job with parameter servers from its start to its end.

Events go in (`heard`, `exited`, `asked`, `signalled`, `from_servers`, `tick`); `outcome` is set when the job has ended. Each
turn of the event loop ends with `tick`, which reads:

    1. take the progress of the queues            (`port.ServerControl`)
    2. start, end and kill workers                (`workers`)
    3. find workers that do not answer, and a job that stands still
    4. answer the change of size that is in place
    5. when no worker is left: a checkpoint if it was stopped, the digest if it is finished, the outcome

    WAITING_FOR_NODES ─▶ STARTING ─▶ TRAINING ─▶ ENDING ─▶ ENDED
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gyrostat.core.events import Event, EventKind
from gyrostat.core.evidence import Evidence
from gyrostat.core.job import ServerAccess
from gyrostat.core.phase import JOB_TRANSITIONS, JobPhase, transition
from gyrostat.core.roles import ProcessRole
from gyrostat.job.control.device_assignment import Slot
from gyrostat.job.control.observer import Observer
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.replies import IdempotentReplies, Requester
from gyrostat.job.control.requests import Request, RequestResult, Status
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.control.worker_tracker import FailureCause, JobFailure
from gyrostat.job.diagnostics.stacks import SIGNAL as STACKS_SIGNAL
from gyrostat.job.processes.protocol import (
    Failed,
    FromWorker,
    Logged,
    Ping,
    Started,
    StepReports,
    WorkerEnded,
    WorkerId,
)
from gyrostat.job.server_job.liveness import WorkerLiveness
from gyrostat.job.server_job.port import (
    FromServers,
    ScriptLogged,
    ServerControl,
    ServerJobExecutor,
    ServersCheckpointed,
)
from gyrostat.job.server_job.requests import ServerRequests, SizeChange
from gyrostat.job.server_job.status import server_job_status
from gyrostat.job.server_job.tally import ServerTally
from gyrostat.job.server_job.workers import Order, ServerWorkers, StartMember, WorkerFate

logger = logging.getLogger(__name__)

_SERVER_LOSSES = 3
"""So many of them, for each start that `--restarts` allows, may be lost without an update in between."""

_NO_SERVERS_USED = "the script ended without parameter servers: it never called gyrostat.servers(job); run it without --servers"


@dataclass
class _Change:
    """A change of size under way."""

    change: SizeChange
    since: float
    before: tuple[int, int]
    servers_done: bool


class ServerJobLeader:
    def __init__(
        self, request: RunRequest, executor: ServerJobExecutor, servers: ServerControl, observer: Observer
    ) -> None:
        assert request.servers is not None
        self._request, self._executor, self._servers = request, executor, servers
        self._observer = observer
        self.outcome: Outcome | None = None
        self.phase = JobPhase.WAITING_FOR_NODES
        settings = request.servers
        self._workers = ServerWorkers(settings.workers, request.failures)
        self._tally = ServerTally(
            request.placement.virtual_workers, settings.workers, settings.role.count, time.monotonic()
        )
        self._replies = IdempotentReplies()
        self._requests = ServerRequests(self, self._replies)
        self._change: _Change | None = None
        self._schedule = list(request.schedule)
        self._liveness = WorkerLiveness(request.failures)
        self._stop = _Stop()
        self._server_losses = 0
        """Since the last update."""

    # Workers.

    def begin(self) -> None:
        self._enter(JobPhase.STARTING)
        self._servers.begin()

    def heard(self, worker_id: WorkerId, message: FromWorker) -> None:
        now, member = time.monotonic(), worker_id.member
        self._liveness.heard(member, message, now)
        match message:
            case Started():
                self._workers.started(member)
                self._training_begins(now)
            case StepReports(steps=steps):
                message = StepReports(self._tally.renumbered(steps))
            case Failed():
                self._workers.reported_failure(member, message)
            case WorkerEnded():
                self._workers.reported_end(member, message)
            case Logged() if not self._tally.logged(message, member):
                return
        self._observer.heard(member, message)

    def _training_begins(self, now: float) -> None:
        self._tally.began(self._servers.progress, now)
        if self.phase is not JobPhase.STARTING:
            return
        self._enter(JobPhase.TRAINING)
        self._liveness.progressed(now)
        if (path := self._servers.resumed_from) is not None:
            self._show(self._tally.note(EventKind.RESUME, f"resumed from {path}", now))
        for reason in self._servers.refused:
            self._show(self._tally.note(EventKind.RESUME, reason, now))

    def exited(self, worker_id: WorkerId, code: int, evidence: Evidence) -> None:
        now, member = time.monotonic(), worker_id.member
        held = self._servers.held_by(str(member))
        before = len(self._workers.members)
        found = self._workers.exited(member, code, evidence, held, self._servers.progress.updates, now)
        if found.fate is not WorkerFate.FINISHED:
            self._servers.worker_lost(str(member))
        if found.fate is WorkerFate.DIED:
            self._observer.worker_died(member, found.how, self._tally.updates, found.evidence)
            event = self._tally.note(
                EventKind.FAILURE,
                f"worker {member} {found.how}",
                now,
                role=ProcessRole.WORKER,
                before=before,
                after=len(self._workers.members),
                recovered_from="queues",
                evidence=found.evidence,
            )
            self._show(event)
        elif found.fate is WorkerFate.FINISHED:
            self._enter(JobPhase.ENDING)

    # Servers.

    def from_servers(self, found: FromServers) -> None:
        """Something happened to servers, slots or checkpoints."""
        now = time.monotonic()
        match found:
            case ScriptLogged(step=step, metrics=metrics):
                self._tally.logged(found)
                self._observer.heard(0, Logged(step, metrics))
            case ServersCheckpointed():
                self._show(self._tally.checkpointed(found, now))
            case _:
                self._show(self._tally.happened(found, now))
                if found.kind is EventKind.FAILURE:
                    self._servers_failed(found.reason)

    def _servers_failed(self, reason: str) -> None:
        """Servers that die again and again while no update is made would do so for ever."""
        self._server_losses += 1
        most = (self._request.failures.restarts + 1) * max(_SERVER_LOSSES, self.servers)
        if self._server_losses > most and self._workers.failure is None:
            self._fail_servers(
                f"{reason}; {self._server_losses} losses of servers in a row without an update"
            )

    def _fail_servers(self, summary: str) -> None:
        self._workers.failure = JobFailure(
            worker=0, cause=FailureCause.LOST, summary=summary, role=ProcessRole.SERVER
        )

    # Signals and requests.

    def signalled(self, number: int) -> None:
        """The user has sent a signal. The first one to stop ends workers after their batches; the second one kills."""
        now = time.monotonic()
        if number == signal.SIGUSR1:
            if self.checkpoints:
                self.request_checkpoint()
            return
        again, self._stop.signal = self._stop.signal is not None, self._stop.signal or number
        self._stop.at_once |= again
        self._workers.end(now, at_once=again)

    def asked(self, request: Request, requester: Requester) -> None:
        self._requests.handle(request, requester)

    @property
    def checkpoints(self) -> bool:
        """Whether the job writes checkpoints where its user said."""
        return self._request.options.checkpoint is not None

    @property
    def members(self) -> tuple[int, ...]:
        return self._workers.members

    @property
    def servers(self) -> int:
        return self._tally.servers

    @property
    def has_devices(self) -> bool:
        return self._request.device_assignment is not None

    @property
    def busy(self) -> str | None:
        if self._change is not None:
            return "busy: the job's size is being changed; retry"
        if self.phase is not JobPhase.TRAINING or self._stop.signal is not None:
            return f"busy: the job is {self.phase}; retry"
        return None

    def request_checkpoint(self) -> None:
        self._servers.checkpoint(self._checkpoint_done)

    def _checkpoint_done(self, problem: str | None) -> None:
        if problem is not None:
            self._show(self._tally.note(EventKind.CHECKPOINT_FAILED, problem, time.monotonic()))

    def stop(self) -> None:
        self._stop.requested = True
        self.signalled(signal.SIGTERM)

    def change(self, change: SizeChange) -> None:
        now = time.monotonic()
        before = len(self.members), self.servers
        self._change = _Change(change, now, before, servers_done=change.servers == self.servers)
        if not self._change.servers_done:
            self._servers.scale(change.servers, self._servers_scaled)
        self._workers.resize(change.workers, change.leaving, now=now)

    def _servers_scaled(self, problem: str | None) -> None:
        if self._change is None:
            return
        if problem is None:
            self._change.servers_done, self._tally.servers = True, self._change.change.servers
            return
        under_way, self._change = self._change, None
        self._replies.answer(under_way.change.request, RequestResult(False, problem, self._tally.updates))

    def occupy(self, change: SizeChange, slots: tuple[Slot, ...]) -> None:
        """Run on exactly these devices, one worker on each."""
        devices = self._request.device_assignment
        assert devices is not None
        self.change(replace(change, leaving=devices.retarget(slots, self.members)))

    def vacate(self, devices: tuple[int, ...]) -> None:
        """Its workers on these devices have not left in time: they are killed, and nobody takes their place there."""
        assignment = self._request.device_assignment
        if assignment is None:
            return
        evicted = assignment.on(devices, self._workers.living)
        assignment.withdraw(devices)
        self._workers.resize(min(self._workers.target, assignment.size), evicted, now=time.monotonic())
        self._kill(dict.fromkeys(evicted, "was evicted: it had not left its device in time"))

    def status(self) -> Status:
        changing = self._change is not None or not self._workers.settled
        living, servers = self._workers.living, self._servers.servers()
        settled = self._servers.settled
        return server_job_status(
            self._request, self.phase, living, self._tally, servers, changing=changing, settled=settled
        )

    def close(self) -> None:
        self._replies.close("the job has ended")

    # Time.

    def tick(self) -> None:
        """Time has passed, or an event has happened."""
        now = time.monotonic()
        self._servers.tick(now)
        if self.outcome is not None:
            return
        if self._tally.progressed(self._servers.progress, now):
            self._server_losses = 0
            self._requests.updated()
            self._liveness.progressed(now)
        if self._servers.failure is not None and self._workers.failure is None:
            self._fail_servers(self._servers.failure)
        self._follow_schedule(now)
        self._carry_out(self._workers.orders(self._tally.updates, now))
        self._check_liveness(now)
        self._answer_change(now)
        if self._workers.over:
            self._conclude(now)

    def deadline(self) -> float | None:
        now = time.monotonic()
        times = [self._servers.deadline(), self._workers.deadline(now), self._liveness.deadline()]
        return min((each for each in times if each is not None), default=None)

    def _follow_schedule(self, now: float) -> None:
        while self._schedule and self._tally.updates >= self._schedule[0][0] and self.busy is None:
            update, workers = self._schedule.pop(0)
            reason = f"--schedule {update}:{workers}"
            self.change(SizeChange(request="", workers=workers, servers=self.servers, reason=reason))

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, StartMember):
                self._start(order.member)
            else:
                self._executor.signal(WorkerId(0, order.member), order.signal)

    def _start(self, member: int) -> None:
        if (devices := self._request.device_assignment) is not None:
            devices.assign(member, self._workers.members)
        assert self._request.servers is not None
        access = ServerAccess(
            address=self._servers.address,
            token=self._servers.token,
            worker=str(member),
            record=self._request.servers.record is not None,
        )
        self._executor.start(WorkerId(0, member), self._request.server_worker(member, access))

    def _check_liveness(self, now: float) -> None:
        living = self._workers.living
        pings, silent = self._liveness.check(living, now)
        self._kill(silent)  # it may wake up later
        for member in living if pings else ():
            self._executor.tell(WorkerId(0, member), Ping())
        if self._liveness.asks_for_stacks(living, now):
            for member in living:
                self._executor.signal(WorkerId(0, member), STACKS_SIGNAL)
        if (standstill := self._liveness.standstill(now)) is not None:
            found, hanging = standstill
            self._tally.note(EventKind.STANDSTILL, str(found), now, evidence=found.stack_lines())
            self._observer.stood_still(found)
            self._kill(hanging)

    def _kill(self, members: Mapping[int, str]) -> None:
        for member, why in members.items():
            self._carry_out(self._workers.kill(member, why))

    def _answer_change(self, now: float) -> None:
        under_way = self._change
        if under_way is None or not (under_way.servers_done and self._workers.settled):
            return
        self._change = None
        workers, servers = len(self.members), self.servers
        self._tally.workers = workers
        if under_way.before[0] != workers or under_way.change.leaving:
            event = self._tally.note(
                EventKind.RESIZE,
                f"{workers} worker{'s' * (workers != 1)} instead of {under_way.before[0]} ({under_way.change.reason})",
                now,
                role=ProcessRole.WORKER,
                before=under_way.before[0],
                after=workers,
                pause_ms=0.0,
            )
            self._show(event)
        text = (
            f"{workers} worker{'s' * (workers != 1)} and {servers} server{'s' * (servers != 1)} "
            f"since update {self._tally.updates}"
        )
        took_ms = (now - under_way.since) * 1e3
        answer = RequestResult(True, text, self._tally.updates, workers, 0.0, took_ms)
        self._replies.answer(under_way.change.request or None, answer)

    # The end.

    def _conclude(self, now: float) -> None:
        """No worker is left: the outcome, after a checkpoint or the digest if one is due."""
        stop, failure = self._stop, self._workers.failure
        if failure is not None:
            self._end(now, failure=failure)
        elif self._workers.finished:
            if not self._servers.progress.opened:
                refused = JobFailure(
                    worker=0, cause=FailureCause.REFUSED, summary=_NO_SERVERS_USED, exit_code=2
                )
                self._end(now, failure=refused)
            elif not stop.saving:
                stop.saving = True
                self._enter(JobPhase.ENDING)
                self._servers.digest(lambda digest: self._end(time.monotonic(), digest=digest))
        elif self.checkpoints and not stop.at_once and self._servers.progress.opened:
            if not stop.saving:
                stop.saving = True
                self._servers.checkpoint(self._stopped)
        else:
            self._end(now)

    def _stopped(self, problem: str | None) -> None:
        self._checkpoint_done(problem)
        self._end(time.monotonic())

    def _end(self, now: float, *, failure: JobFailure | None = None, digest: str | None = None) -> None:
        stop = self._stop
        if failure is not None:
            evidence = failure.evidence.describe()
            self._tally.note(EventKind.FAILURE, str(failure), now, role=failure.role, evidence=evidence)
        elif digest is None:
            self._tally.note(EventKind.STOP, "asked to stop", now)
        self._enter(JobPhase.ENDED)
        self.outcome = self._tally.outcome(
            now=now,
            exit_codes=self._workers.codes,
            failure=failure,
            digest=digest,
            stopped_by=None if digest is not None else stop.signal,
            stop_requested=stop.requested,
            resumed_from=self._servers.resumed_from,
            refused=self._servers.refused,
        )

    # Internals.

    def _enter(self, phase: JobPhase) -> None:
        """The only place that changes the phase."""
        before, self.phase = self.phase, transition(self.phase, phase, JOB_TRANSITIONS)
        if phase is not before:
            fields = {"job": self._request.name, "step": self._tally.updates}
            logger.info("%s, was %s", phase, before, extra=fields)

    def _show(self, event: Event) -> None:
        self._observer.happened(event)


@dataclass
class _Stop:
    """How the job is to end."""

    signal: int | None = None
    """By which the user asked to stop."""
    requested: bool = False
    """By `gyrostat stop`."""
    at_once: bool = False
    """Without a checkpoint."""
    saving: bool = False
    """The last checkpoint or the digest is being made."""
