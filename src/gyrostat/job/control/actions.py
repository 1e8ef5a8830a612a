"""Carries out what a leader decides, after its record has been kept.

An action is an instruction of the coordinator, a signal, or a reply. The record for the next leader includes the replies, so it
is kept before any of them is sent. While it cannot be kept, actions wait, and workers train on.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gyrostat.core.evidence import NO_EVIDENCE, Evidence
from gyrostat.core.phase import ReconfigurationPhase
from gyrostat.core.plural import plural
from gyrostat.job.control.attempt import Attempt
from gyrostat.job.control.executor import LeaderRecord, RecordRefused, WorkerExecutor
from gyrostat.job.control.instructions import (
    EndNewcomer,
    GiveUp,
    Instruction,
    ProfileDone,
    ReconfigurationDone,
    ReconfigurationRefused,
    StartNewcomer,
    StragglerNoticed,
    SurvivorsGoOn,
    TellMember,
)
from gyrostat.job.control.observer import Observer
from gyrostat.job.control.outcome import Tally
from gyrostat.job.control.replies import IdempotentReplies, Requester, Result
from gyrostat.job.control.requests import ProfileTable, RequestResult
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.control.shard_service import Pulled
from gyrostat.job.control.worker_tracker import SendSignal
from gyrostat.job.processes.protocol import Terminate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchWorker:
    """Start a worker of the attempt's first generation."""

    member: int


@dataclass(frozen=True)
class KeepRecord:
    """Nothing is to be done, but the next leader must know the new state."""


@dataclass(frozen=True)
class ReplyTo:
    """Answer all that wait for this request."""

    request: str | None
    answer: Result


@dataclass(frozen=True)
class ReplyOnce:
    """Answer one requester, whose request has no id."""

    requester: Requester
    reply: RequestResult | Pulled


Action = Instruction | SendSignal | LaunchWorker | KeepRecord | ReplyTo | ReplyOnce


class ActionQueue:
    def __init__(
        self,
        request: RunRequest,
        executor: WorkerExecutor,
        observer: Observer,
        tally: Tally,
        replies: IdempotentReplies,
        *,
        attempt: Callable[[], Attempt | None],
        record: Callable[[], LeaderRecord],
    ) -> None:
        """`attempt`: the one that runs now; `record`: makes the record for the next leader."""
        self._request, self._executor, self._observer = request, executor, observer
        self._tally, self._replies, self._attempt, self._record = tally, replies, attempt, record
        self._queue: list[Action] = []
        self._logged = ReconfigurationPhase.STEADY

    def __bool__(self) -> bool:
        return bool(self._queue)

    def defer(self, action: Action) -> None:
        """Carried out with the next actions, so that one record serves all requests of a turn of the loop."""
        self._queue.append(action)

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ReplyTo(request=request, answer=answer):
                    self._replies.note(request, answer)
                case ProfileDone(profile=profile, rows=rows):
                    self._replies.note(profile.request, ProfileTable(rows))
                case ReconfigurationDone() | ReconfigurationRefused():
                    self._replies.note(action.change.request, self._result(action))
            if isinstance(action, ReconfigurationDone) and (attempt := self._attempt()) is not None:
                attempt.tracker.joined(
                    action.joined
                )  # a fact: from now on the exit of one of them is a member's
        self._log_change()
        self._queue += actions
        self.flush()

    def flush(self) -> None:
        """Keep the record, then act. If it cannot be kept now, actions wait until the next call; if it never can, the job
        cannot go on: the next leader would not know what this one has done."""
        try:
            kept = bool(self._queue) and self._executor.keep(self._record)
        except RecordRefused as refused:
            attempt, self._queue = self._attempt(), []
            if attempt is None:
                raise
            attempt.tracker.gave_up(str(refused), time.monotonic())
            return
        if kept:
            queue, self._queue = self._queue, []
            for action in queue:
                self._do(action)

    def send(self, signals: Sequence[SendSignal]) -> None:
        """Send signals at once."""
        attempt = self._attempt()
        assert attempt is not None
        for order in signals:
            for member in order.workers:
                if order.signal == signal.SIGTERM and not self._request.options.reference:
                    # The signal itself would ask this worker alone to leave.
                    message = Terminate(final=attempt.tracker.ends)
                    self._executor.tell(attempt.worker_id(member), message)
                else:
                    self._executor.signal(attempt.worker_id(member), order.signal)

    def _do(self, action: Action) -> None:
        match action:
            case ReplyOnce(requester=requester, reply=reply):
                requester.answer(reply)
            case ReplyTo(request=request, answer=answer):
                self._replies.answer(request, answer)
            case ProfileDone(profile=profile, rows=rows):
                self._replies.answer(profile.request, ProfileTable(rows))
            case ReconfigurationDone():
                self._reconfigured(action)
            case ReconfigurationRefused(change=change, reason=reason, retryable=retryable):
                if not retryable:
                    self._tally.refused(change, reason, time.monotonic())
                    self._observer.refused(change, reason)
                self._replies.answer(change.request, self._result(action))
            case SurvivorsGoOn():
                self._recovered(action)
            case StragglerNoticed(straggler=straggler):
                self._tally.noticed(straggler, time.monotonic())
                self._observer.noticed(straggler)
            case SendSignal():
                self.send([action])
            case _ if (attempt := self._attempt()) is not None:
                self._do_to_workers(attempt, action)

    def _do_to_workers(self, attempt: Attempt, action: Action) -> None:
        match action:
            case StartNewcomer(member=member) | LaunchWorker(member=member):
                joins, traces = isinstance(action, StartNewcomer), self._executor.traces(attempt.number)
                assignment = attempt.assignment(member, joins=joins, traces=traces)
                self._executor.start(attempt.worker_id(member), assignment)
            case TellMember(member=member, message=message):
                self._executor.tell(attempt.worker_id(member), message)
            case EndNewcomer(member=member):
                self._executor.signal(attempt.worker_id(member), signal.SIGKILL)
            case GiveUp(reason=reason):
                attempt.tracker.gave_up(reason, time.monotonic())

    def recover_without(self, attempt: Attempt, member: int, code: int, how: str) -> None:
        """A member has died, and the others recover."""
        attempt.tracker.recover_without(member, code)
        self._observer.worker_died(member, how, self._tally.step, attempt.tracker.evidence_of((member,)))

    def newcomer_exited(
        self, attempt: Attempt, member: int, how: str, evidence: Evidence | None, now: float
    ) -> None:
        """A new worker has died, unless it was ended because it is not needed any more."""
        if member in attempt.coordinator.generations.newcomers:
            lines = (evidence or NO_EVIDENCE).describe()
            self._observer.worker_died(member, f"{how} before it joined", self._tally.step, lines)
        self.carry_out(attempt.coordinator.newcomer_gone(member, how, now))

    def _reconfigured(self, done: ReconfigurationDone) -> None:
        if done.joined or done.before != done.after or done.change.counts is not None:
            self._tally.resized(done, time.monotonic())
            self._observer.resized(done)
        logger.info("%d workers: %s", done.after, done.change.reason, extra=self._fields(done.step))
        if (violation := self._violation()) is not None:
            logger.error("%s", violation, extra=self._fields(done.step))
        self._replies.answer(done.change.request, self._result(done))

    def _recovered(self, done: SurvivorsGoOn) -> None:
        attempt = self._attempt()
        evidence = attempt.tracker.evidence_of(done.lost) if attempt is not None else ()
        logger.info("recovered on %d workers: %s", done.after, done.reason, extra=self._fields(done.step))
        self._tally.recovered(done, str(self._request.options.recovery), evidence, time.monotonic())
        self._observer.recovered(done)

    def _result(self, result: ReconfigurationDone | ReconfigurationRefused) -> RequestResult:
        if isinstance(result, ReconfigurationRefused):
            attempt = self._attempt()
            workers = len(attempt.coordinator.members) if attempt is not None else 0
            return RequestResult(
                False,
                result.reason,
                self._tally.step,
                workers,
                retryable=result.retryable,
                invalid=result.invalid,
            )
        if (violation := self._violation()) is not None:
            return RequestResult(False, violation, result.step, result.after)
        text = f"{plural(result.after, 'worker')} since step {result.step}"
        return RequestResult(
            True, text, result.step, result.after, result.paused * 1e3, result.prepared * 1e3
        )

    def _violation(self) -> str | None:
        """A change that has put workers on wrong devices is not done."""
        devices, attempt = self._request.device_assignment, self._attempt()
        return None if devices is None or attempt is None else devices.violation(attempt.coordinator.members)

    def _log_change(self) -> None:
        """Each phase of a change once."""
        attempt = self._attempt()
        if attempt is not None and (phase := attempt.coordinator.generations.phase) is not self._logged:
            self._logged = phase
            change = attempt.coordinator.generations.change
            reason = f": {change.reason}" if change is not None else ""
            logger.info("%s%s", phase, reason, extra=self._fields(self._tally.step))

    def _fields(self, step: int) -> dict[str, object]:
        attempt = self._attempt()
        generation = attempt.coordinator.generations.current if attempt is not None else 0
        return {"job": self._request.name, "generation": generation, "step": step}
