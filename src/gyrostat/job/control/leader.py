"""Leads one job from its start to its end.

A `Leader` lives in the event loop of `launcher` or of an agent. Events go in (`heard`, `exited`, `lost`, `asked`, `signalled`,
`tick`). `coordinator` decides which workers the job consists of, `worker_tracker` which of them failed and which are to be
ended; `actions` carries that out. Each start of the job's workers is an `attempt`. `request_handler` handles requests, and
`liveness` finds workers that do not answer. `outcome` is set when the job has ended.

The leader's state is a `JobPhase`; `core.phase` has the table of its transitions, and only `_enter` changes it:

    WAITING_FOR_NODES ─▶ STARTING ─▶ TRAINING ─▶ ENDING ─▶ ENDED
                            ▲         │    ╰──▶ SUSPENDING ─▶ SUSPENDED ─▶ RESUMING ─▶ TRAINING
                            ╰── RESTARTING      (a failure in any phase with workers leads to RESTARTING or ENDED)
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gyrostat.core.evidence import Evidence
from gyrostat.core.phase import JOB_TRANSITIONS, JobPhase, transition
from gyrostat.core.plural import plural
from gyrostat.job.control.actions import ActionQueue, KeepRecord, LaunchWorker, ReplyTo
from gyrostat.job.control.attempt import Attempt
from gyrostat.job.control.executor import LeaderRecord, WorkerExecutor, ZeroScaleRequest
from gyrostat.job.control.liveness import Liveness
from gyrostat.job.control.observer import Observer
from gyrostat.job.control.outcome import Outcome, Tally
from gyrostat.job.control.replies import IdempotentReplies, Requester
from gyrostat.job.control.request_handler import RequestHandler
from gyrostat.job.control.requests import Request, RequestResult, Status
from gyrostat.job.control.restarts import Restarts
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.control.status import status_of
from gyrostat.job.control.suspension import Suspension
from gyrostat.job.control.worker_tracker import RESTARTABLE, describe_exit
from gyrostat.job.diagnostics.poison import Death
from gyrostat.job.diagnostics.stacks import SIGNAL as STACKS_SIGNAL
from gyrostat.job.processes.protocol import (
    Failed,
    FailureKind,
    FromWorker,
    Ping,
    Started,
    Terminate,
    WorkerEnded,
    WorkerId,
)

logger = logging.getLogger(__name__)

_RETRY_S = 0.25


@dataclass(frozen=True)
class _Restart:
    """The next attempt, and when it begins."""

    request: RunRequest
    at: float


class Leader:
    def __init__(self, request: RunRequest, executor: WorkerExecutor, observer: Observer) -> None:
        self._request, self._executor, self._observer = request, executor, observer
        self.phase = JobPhase.WAITING_FOR_NODES
        self.attempt: Attempt | None = None
        """The one that runs now."""
        self.outcome: Outcome | None = None
        self._number = -1
        """Of the last attempt."""
        self._restart: _Restart | None = None
        self._restarts = Restarts(request.failures.restarts)
        self._deaths: list[Death] = []
        self._suspension = Suspension()
        placement = request.actual_placement()
        self._tally = Tally(placement.virtual_workers, placement.workers, time.monotonic())
        self._liveness = Liveness(request, executor)
        replies = IdempotentReplies()
        self._actions = ActionQueue(
            request,
            executor,
            observer,
            self._tally,
            replies,
            attempt=lambda: self.attempt,
            record=self.record,
        )
        self._requests = RequestHandler(self, request, self._tally, replies, self._actions)

    @property
    def has_begun(self) -> bool:
        """The job has been started, by this leader or a previous one."""
        return self._number >= 0

    # The start, and the change of leaders.

    def begin(self) -> None:
        """Start the job."""
        self._begin(self._request)

    def take_over(self, record: LeaderRecord) -> None:
        """Continue where another leader stopped. Workers report again what they know."""
        now = time.monotonic()
        request = replace(self._request, placement=record.placement, schedule=record.schedule)
        self._request = request = request.resuming() if record.attempt > 0 else request
        self.phase, self._number = record.phase, record.attempt
        self._deaths, self._restarts = list(record.deaths), record.restarts
        self._suspension = Suspension(record.zero_scale, now, record.step)
        self._requests.restore(record.answered, record.shards, now)
        self._tally.virtual_workers, self._tally.taken_over = record.virtual_workers, True
        logger.info("taken over: %s", self.phase, extra=self._fields())
        if self.phase is JobPhase.RESTARTING:
            self._restart = _Restart(request, now)
        elif record.coordinator is None:
            self._tally.workers = 0 if self.has_begun else self._tally.workers
        else:
            store = partial(self._executor.store, record.attempt)
            self.attempt = Attempt.restore(record.attempt, request, self._deaths, store, record.coordinator)
            self._take_over_workers(self.attempt, now)

    def _take_over_workers(self, attempt: Attempt, now: float) -> None:
        coordinator = attempt.coordinator
        self._tally.workers = len(coordinator.members)
        for member in coordinator.leaving:
            attempt.tracker.leaving(member, now + attempt.request.failures.grace_s)
        if coordinator.training:
            self._actions.send(attempt.tracker.began())
        if (change := coordinator.generations.change) is not None and change.request is not None:
            self._requests.replies.under_way(change.request)
        if self._suspension.request is not None:
            self._requests.replies.under_way(self._suspension.request.request)
        if self.phase is JobPhase.SUSPENDING:
            self._actions.send(attempt.tracker.signalled(signal.SIGTERM, now))
        self._actions.carry_out(coordinator.took_over(now))

    def record(self) -> LeaderRecord:
        attempt, restart = self.attempt, self._restart
        request = self._request if restart is None else restart.request
        request = attempt.request if attempt is not None else request
        return LeaderRecord(
            attempt=self._number,
            phase=self.phase,
            restarts=self._restarts,
            deaths=tuple(self._deaths),
            virtual_workers=self._tally.virtual_workers,
            placement=request.placement,
            schedule=tuple(request.schedule),
            coordinator=attempt.coordinator.record() if attempt is not None else None,
            step=self._suspension.step,
            zero_scale=self._suspension.request,
            answered=self._requests.replies.answered,
            shards=self._requests.shards.record(),
        )

    # Workers.

    def heard(self, worker_id: WorkerId, message: FromWorker) -> None:
        """A worker reports."""
        attempt = self._current(worker_id)
        if attempt is None:
            return
        now, member, tracker = time.monotonic(), worker_id.member, attempt.tracker
        if member in tracker.recovered_without:  # it was given up, and the others go on without it
            self._executor.signal(worker_id, signal.SIGKILL)
            return
        self._tally.add(member, message, now)
        self._liveness.heard(member, message, now)
        if isinstance(message, Failed):
            if self._worker_failed(attempt, member, message, now):
                return
        elif isinstance(message, WorkerEnded):
            tracker.ended(member, message)
            if message.left:
                self._actions.carry_out(attempt.coordinator.left(member, now))
            else:
                attempt.complete |= member in self._tally.finished
                if self.phase is not JobPhase.SUSPENDING:
                    self._enter(JobPhase.ENDING)
                self._actions.carry_out(attempt.coordinator.end())
        elif isinstance(message, Started):
            self._actions.send(tracker.began())
            self._training_begins(message, now)
        self._actions.carry_out(attempt.report(member, message, self._tally.virtual_workers, now))
        if isinstance(message, Started):  # from now on a death is not the end
            self._actions.carry_out([KeepRecord()])
        self._requests.stepped()
        self._observer.heard(member, message)

    def _worker_failed(self, attempt: Attempt, member: int, message: Failed, now: float) -> bool:
        """True if the others recover, and the message needs no further attention."""
        tracker = attempt.tracker
        lost_peer = message.kind is FailureKind.PEER_LOST
        if (
            member in attempt.coordinator.generations.newcomers
        ):  # it may be a member now, for others have begun with it
            reason = message.summary if lost_peer else f"raised {message.summary}"
            self._actions.carry_out(attempt.coordinator.newcomer_gone(member, reason, now))
        recoverable = lost_peer and tracker.recoverable_death(member, 0, None) is not None
        if recoverable and self._recover(attempt, member, 0, message.summary):
            return True
        if member in tracker.members:  # otherwise it was given up, and reports that it lost us
            tracker.failed(member, message, now)
        return False

    def exited(self, worker_id: WorkerId, code: int, evidence: Evidence | None = None) -> None:
        """A worker's process has ended."""
        attempt, member, now = self._current(worker_id), worker_id.member, time.monotonic()
        if attempt is None:
            return
        tracker = attempt.tracker
        if member not in tracker.members:
            self._actions.newcomer_exited(attempt, member, describe_exit(code), evidence, now)
        if member in tracker.members:
            how = tracker.recoverable_death(member, code, evidence)
            if how is None or not self._recover(attempt, member, code, how):
                tracker.exited(member, code, now, evidence)

    def lost(self, worker_id: WorkerId, why: str) -> None:
        """A worker is out of reach, and is given up."""
        attempt, member, now = self._current(worker_id), worker_id.member, time.monotonic()
        if attempt is None:
            return
        tracker = attempt.tracker
        if member not in tracker.members:
            self._actions.carry_out(attempt.coordinator.newcomer_gone(member, why, now))
        if member in tracker.members:
            recoverable = tracker.recoverable_death(member, 0, None) is not None
            if not (recoverable and self._recover(attempt, member, -signal.SIGKILL, f"was lost: {why}")):
                tracker.lost(member, why, now)

    def _recover(self, attempt: Attempt, member: int, code: int, how: str) -> bool:
        """A member has died. True: the others go on without it."""
        logger.info("worker %d %s", member, how, extra=self._fields())
        if attempt.complete:  # all have passed the last reduction, and one has reported the result
            self._actions.recover_without(attempt, member, code, how)
            for other in attempt.tracker.living:
                self._executor.tell(attempt.worker_id(other), Terminate(final=True))
            return True
        reason = f"worker {member} {how}"
        instructions = attempt.coordinator.begin_recovery((member,), reason, time.monotonic())
        if instructions is None:
            return False
        self._actions.recover_without(attempt, member, code, how)
        self._tally.may_repeat()
        self._actions.carry_out(instructions)
        return True

    def back(self, worker_id: WorkerId) -> None:
        """A worker can be reached again, whose agent was away."""
        attempt = self._current(worker_id)
        if attempt is not None:
            self._actions.carry_out(attempt.coordinator.generations.resend(worker_id.member))
        elif worker_id.attempt < self._number:  # it was given up with its attempt
            self._executor.signal(worker_id, signal.SIGKILL)

    @property
    def stopped_by_workers(self) -> bool:
        """Workers have stopped the job at a boundary without a request: their agent was away for too long."""
        tracker = self.attempt.tracker if self.attempt is not None else None
        return tracker is not None and tracker.stopped and tracker.stopped_by is None

    # Signals and requests.

    def signalled(self, number: int) -> None:
        """The user has sent a signal."""
        now = time.monotonic()
        if self.attempt is not None:
            self._actions.send(self.attempt.tracker.signalled(number, now))
        elif number != signal.SIGUSR1:  # a job without workers is its checkpoint
            codes = self._suspension.exit_codes
            self._end(
                self._tally.outcome(now=now, exit_codes=codes, failure=None, stopped=True, stopped_by=number)
            )

    def asked(self, request: Request, requester: Requester) -> None:
        """A client sends a request."""
        self._requests.handle(request, requester)

    def free(self, members: Sequence[int]) -> None:
        """The nodes of these workers leave. Called again until the workers have left."""
        self._requests.free(members)

    def status(self) -> Status:
        return status_of(self._request, self.phase, self.attempt, self._tally, self._step)

    def close(self) -> None:
        self._requests.replies.close("the job has ended")

    # Time.

    def tick(self) -> None:
        """Time has passed, or an event has happened."""
        self._actions.flush()
        now = time.monotonic()
        if self._restart is not None and now >= self._restart.at:
            request, self._restart = self._restart.request, None
            self._begin(request)
        attempt = self.attempt
        if attempt is None or self.phase is JobPhase.ENDED:
            return
        self._actions.send(attempt.tracker.orders(now))
        if not attempt.tracker.ends:
            self._actions.carry_out(attempt.coordinator.tick(now))
        self._check_liveness(attempt, now)
        if attempt.tracker.over and not self._actions:
            self._conclude(attempt, now)

    def deadline(self) -> float | None:
        """When `tick` has something to do by itself."""
        if self.phase is JobPhase.ENDED:
            return None
        deadlines = [*self._liveness.deadlines(), self._restart.at if self._restart is not None else None]
        if self._actions:
            deadlines.append(time.monotonic() + _RETRY_S)
        if self.attempt is not None:
            ends, coordinator = self.attempt.tracker.ends, self.attempt.coordinator
            deadlines += [self.attempt.tracker.deadline(), None if ends else coordinator.deadline()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _check_liveness(self, attempt: Attempt, now: float) -> None:
        pings, silent = self._liveness.check(attempt, now)
        for member in silent:  # killed, because it may wake up later
            self._executor.signal(attempt.worker_id(member), signal.SIGKILL)
            timeout = self._liveness.heartbeat_timeout_s
            self.lost(attempt.worker_id(member), f"silent for {timeout:g} s")
        for member in pings:
            self._executor.tell(attempt.worker_id(member), Ping())
        for member in self._liveness.asks_for_stacks(attempt, now):
            self._executor.signal(attempt.worker_id(member), STACKS_SIGNAL)
        if (found := self._liveness.standstill(now)) is not None:
            self._tally.stood_still(found, now)
            self._observer.stood_still(found)
            if found.ends:
                self._actions.send(attempt.tracker.hangs(found.hanging))

    # Phases.

    def _enter(self, phase: JobPhase) -> None:
        """The only place that changes the phase."""
        before, self.phase = self.phase, transition(self.phase, phase, JOB_TRANSITIONS)
        if phase is not before:
            logger.info("%s, was %s", phase, before, extra=self._fields())

    def _begin(self, request: RunRequest) -> None:
        """STARTING or RESUMING: the workers of the next attempt start."""
        self._number += 1
        resumes = self._suspension.request is not None and self._suspension.request.workers > 0
        self._enter(JobPhase.RESUMING if resumes else JobPhase.STARTING)
        store = partial(self._executor.store, self._number)
        self.attempt = Attempt.begin(self._number, request, self._deaths, store)
        self._actions.carry_out([LaunchWorker(member) for member in self.attempt.coordinator.members])

    def _training_begins(self, message: Started, now: float) -> None:
        """TRAINING: if the job was suspended, the request that resumed it is answered."""
        if self.phase not in (JobPhase.STARTING, JobPhase.RESUMING):
            return
        resumes = self.phase is JobPhase.RESUMING
        self._enter(JobPhase.TRAINING)
        if resumes:
            request, since = self._suspension.take()
            self._tally.resumed(message.step, now, now - since)
            took_ms = (now - since) * 1e3
            text = f"{plural(request.workers, 'worker')} since step {message.step}"
            answer = RequestResult(True, text, message.step, request.workers, took_ms, took_ms)
            self._actions.carry_out([ReplyTo(request.request, answer)])

    def _conclude(self, attempt: Attempt, now: float) -> None:
        """All workers of an attempt have ended: the job is SUSPENDED, RESTARTING or ENDED."""
        tracker = attempt.tracker
        self._suspension.exit_codes = tracker.codes
        self._liveness.rest()
        target = attempt.coordinator.target_workers
        self._actions.carry_out(attempt.coordinator.end())
        cut = tracker.stopped and self._tally.step == attempt.request.options.stop_after
        outcome = self._tally.outcome(
            now=now,
            exit_codes=tracker.codes,
            failure=tracker.failure() or (None if cut else tracker.without_result()),
            cut=cut,
            stopped=tracker.stopped,
            stopped_by=tracker.stopped_by,
        )
        failure = outcome.failure
        died = failure if failure is not None and failure.cause in RESTARTABLE else None
        suspends = self.phase is JobPhase.SUSPENDING and outcome.digest is None
        if suspends and (failure is None or died):
            self._suspended(now)
        elif died and outcome.stopped_by is None and (wait := self._restarts.died(self._step)) is not None:
            self._enter(JobPhase.RESTARTING)
            logger.info("restart in %g s: %s", wait, died, extra=self._fields())
            self._tally.died(died, now)
            self._observer.died(died, wait, attempt.request.newest_checkpoint())
            self._tally.workers = max(outcome.workers, target)
            request = attempt.request.again(outcome.virtual_workers, self._tally.workers)
            self.attempt, self._restart = None, _Restart(request, now + wait)
            self.tick()
        else:
            self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        self._enter(JobPhase.ENDED)
        self.outcome = outcome

    # Suspension: no workers, until some are requested.

    def suspend(self, request: str, now: float) -> None:
        """SUSPENDING: workers checkpoint and end at the next boundary."""
        assert self.attempt is not None
        self._enter(JobPhase.SUSPENDING)
        self._suspension.begin(ZeroScaleRequest(request, 0), now)
        self._actions.carry_out(self.attempt.tracker.signalled(signal.SIGTERM, now))

    def _suspended(self, now: float) -> None:
        self._enter(JobPhase.SUSPENDED)
        request, since = self._suspension.take()
        self.attempt = None
        self._tally.suspended(now)
        self._suspension.step = self._tally.step
        took_ms = (now - since) * 1e3
        text = f"suspended after step {self._step}, until it is given workers again"
        answer = RequestResult(True, text, self._step, 0, took_ms, took_ms)
        self._actions.carry_out([ReplyTo(request.request, answer)])

    def resume(self, request: str, workers: int, now: float) -> None:
        """RESUMING: workers start from the checkpoint."""
        self._suspension.begin(ZeroScaleRequest(request, workers), now)
        self._tally.workers = workers
        self._begin(self._request.resumed(self._tally.virtual_workers, workers, self._step))

    # Internals.

    def _current(self, worker_id: WorkerId) -> Attempt | None:
        """Events of an earlier attempt do not count."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.number == worker_id.attempt else None

    @property
    def _step(self) -> int:
        """The last step that is known to be complete."""
        return max(self._tally.step, self._suspension.step)

    def _fields(self) -> dict[str, object]:
        generation = self.attempt.coordinator.generations.current if self.attempt is not None else 0
        return {"job": self._request.name, "generation": generation, "step": self._step}
