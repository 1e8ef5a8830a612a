"""One job led from its start to its end: which workers it consists of, what they are told, and what came of it.

A `Leader` lives in an agent's loop. What happens goes in (`heard`, `exited`, `asked`, `signalled`, `tick`); what is to be done
is decided by `coordinator` (generations) and `watch` (who failed, who is to be ended) and carried out by its
`WorkerExecutor`, wherever
the workers are. `outcome` is there when the job is over.

A job may be started several times: a start is an attempt. The next one begins from the newest checkpoint, after a worker has
died through no fault of the script's, or when a job that was scaled to zero is wanted again.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from gyrostat.core.evidence import Evidence
from gyrostat.core.job import Assignment
from gyrostat.core.phase import JOB_TRANSITIONS, JobPhase, ReconfigurationPhase, transition
from gyrostat.core.placement import Placement
from gyrostat.job.control.control_socket import (
    AskCheckpoint,
    AskStatus,
    AskStop,
    Migrate,
    Occupy,
    ProfileJob,
    ProfileTable,
    Request,
    RequestResult,
    Scale,
    ScaleBy,
    Status,
)
from gyrostat.job.control.coordinator import (
    Coordinator,
    CoordinatorRecord,
    EndNewcomer,
    GiveUp,
    Instruction,
    ProfileDone,
    Reconfiguration,
    ReconfigurationDone,
    ReconfigurationRefused,
    StartNewcomer,
    StragglerNoticed,
    SurvivorsGoOn,
    TellMember,
)
from gyrostat.job.control.device_assignment import Slot
from gyrostat.job.control.observer import Observer
from gyrostat.job.control.outcome import Outcome, Tally
from gyrostat.job.control.profiling import ProfileRequest
from gyrostat.job.control.replies import IdempotentReplies, Requester, Result
from gyrostat.job.control.restarts import Restarts
from gyrostat.job.control.run_request import FIRST_GENERATION, RunRequest
from gyrostat.job.control.shard_service import OpenShards, Pulled, PullShard, QueuesRecord, ShardService
from gyrostat.job.control.worker_tracker import FailureCause, SendSignal, WorkerTracker
from gyrostat.job.diagnostics.heartbeat import Heartbeats
from gyrostat.job.diagnostics.poison import Death
from gyrostat.job.diagnostics.stacks import SIGNAL as STACKS_SIGNAL
from gyrostat.job.diagnostics.stragglers import Pace
from gyrostat.job.diagnostics.watchdog import Watchdog
from gyrostat.job.processes.protocol import (
    Failed,
    FailureKind,
    FromWorker,
    GenerationPrepared,
    PeerLossReported,
    Ping,
    Ready,
    Recovered,
    Stacks,
    Started,
    StepReports,
    Switched,
    Terminate,
    WorkerEnded,
    WorkerId,
    WorkerLeaving,
)

logger = logging.getLogger(__name__)

_NOWHERE = "the job has nowhere to checkpoint: it was started without --checkpoint-dir"
_BUSY = {
    JobPhase.WAITING_FOR_NODES: "the job has not begun yet; retry",
    JobPhase.RESTARTING: "busy: the job is about to be started again; retry",
    JobPhase.SUSPENDING: "busy: the job is being suspended; retry",
    JobPhase.ENDING: "busy: the job is about to end; retry",
}
_RETRY_S = 0.25
_DIED = (FailureCause.KILLED, FailureCause.VANISHED, FailureCause.PEER_LOST, FailureCause.ORPHANED)


class WorkerExecutor(Protocol):
    """Carries out what a leader decides."""

    def start(self, worker_id: WorkerId, assignment: Assignment) -> None:
        """Start a worker."""

    def tell(self, worker_id: WorkerId, message: msgspec.Struct) -> None:
        """Nothing happens if it has gone; that will be heard of."""

    def signal(self, worker_id: WorkerId, number: int) -> None: ...

    def reaches(self, worker_id: WorkerId) -> bool:
        """False: the worker's agent is away, and what is sent waits for the next one."""

    def store(self, attempt: int, generation: int) -> str:
        """Where the members of a generation find one another."""

    def traces(self, attempt: int) -> Path | None:
        """Where workers put their parts of a trace."""

    def keep(self, record: Callable[[], LeaderRecord]) -> bool:
        """Keep the record for the next leader, if there can be one. False: that is not possible now."""


@dataclass
class _Attempt:
    """One start of the job."""

    number: int
    request: RunRequest
    watch: WorkerTracker
    coordinator: Coordinator


class ZeroScaleRequest(msgspec.Struct, frozen=True):
    """A change to or from no workers at all."""

    request: str
    workers: int


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the next leader cannot learn from the workers."""

    format: int = 1
    attempt: int
    restarts: Restarts
    phase: JobPhase
    deaths: tuple[Death, ...]
    virtual_workers: int
    placement: Placement
    """As the attempt began, or as the suspended job last was."""
    schedule: tuple[tuple[int, int], ...]
    coordinator: CoordinatorRecord | None
    """None: the job is suspended, or has not begun."""
    step: int
    """Complete when it was suspended."""
    suspending: ZeroScaleRequest | None
    resuming: ZeroScaleRequest | None
    answered: dict[str, Result]
    shards: dict[str, QueuesRecord]


@dataclass(frozen=True)
class _Launch:
    """Start a worker that the attempt begins with."""

    member: int


@dataclass(frozen=True)
class _Keep:
    """There is nothing to be done, but the next leader must know what has changed."""


@dataclass(frozen=True)
class _Reply:
    request: str | None
    answer: Result


@dataclass(frozen=True)
class _Tell:
    """Told when the queues of shards are kept, after all requests of this turn have been taken in."""

    asker: Requester
    reply: RequestResult | Pulled


_ToDo = Instruction | SendSignal | _Launch | _Keep | _Reply | _Tell


class Leader:
    def __init__(self, request: RunRequest, executor: WorkerExecutor, observer: Observer) -> None:
        self._request, self._executor, self._observer = request, executor, observer
        crew = request.crew()
        self._tally = Tally(crew.virtual_workers, crew.workers, time.monotonic())
        self._replies = IdempotentReplies()
        self._shards = ShardService()
        self._phase = JobPhase.WAITING_FOR_NODES
        self._attempt: _Attempt | None = None
        self._number = -1
        self._deaths: list[Death] = []
        self._heartbeats = Heartbeats(request.heartbeat_timeout_s)
        self._complete = False
        """A worker has ended with the result."""
        self._restarts = Restarts(request.restarts)
        self._restart_at: float | None = None
        self._next: RunRequest | None = None
        """What is run then."""
        self._suspending: ZeroScaleRequest | None = None
        self._resuming: ZeroScaleRequest | None = None
        self._since = time.monotonic()
        """When that was asked for."""
        self._suspended_at = 0
        self._watchdog = Watchdog(request.watchdog) if request.watchdog is not None else None
        self._codes: dict[int, int] = {}
        self._curious: list[Requester] = []
        """Who wants to be told when the first step is done."""
        self._to_do: list[_ToDo] = []
        self.outcome: Outcome | None = None

    # What happens.

    def begin(self) -> None:
        """Start the job."""
        self._begin(self._request)

    def take_over(self, record: LeaderRecord) -> None:
        """Go on where another leader left off; what workers know, they will say again."""
        request = replace(self._request, placement=record.placement, schedule=record.schedule)
        self._phase = record.phase
        self._number, self._deaths, self._restarts = record.attempt, list(record.deaths), record.restarts
        self._suspending, self._resuming = record.suspending, record.resuming
        self._suspended_at = record.step
        self._replies = IdempotentReplies(record.answered)
        self._shards = ShardService.restore(record.shards, time.monotonic())
        self._tally.virtual_workers = record.virtual_workers
        if record.attempt > 0:
            request = request.resuming()
        self._request = request
        if record.phase is JobPhase.RESTARTING:
            self._next, self._restart_at = request, time.monotonic()
            return
        if record.coordinator is None:
            self._tally.workers = 0 if self.has_begun else self._tally.workers
            return
        coordinator = Coordinator.restore(record.coordinator, store=self._store_of(record.attempt))
        coordinator.pace = Pace(request.stragglers)
        coordinator.recovers, coordinator.min_workers = request.recovers, request.min_workers
        watch = self._watch(coordinator.members, request)
        self._attempt = _Attempt(record.attempt, request, watch, coordinator)
        self._tally.workers = len(coordinator.members)
        now = time.monotonic()
        for member in coordinator.leaving:
            watch.leaving(member, now + request.grace_s)
        if coordinator.training:
            self._obey(watch.began())
        if (pending := coordinator.request()) is not None:
            self._replies.under_way(pending)
        for wanted in (self._suspending, self._resuming):
            if wanted is not None:
                self._replies.under_way(wanted.request)
        if self._suspending is not None:
            self._obey(watch.asked(signal.SIGTERM, now))
        self._carry_out(coordinator.took_over(now))

    @property
    def has_begun(self) -> bool:
        """The job has been started, by this leader or one before."""
        return self._number >= 0

    def heard(self, worker_id: WorkerId, message: FromWorker) -> None:
        """A worker reports."""
        attempt = self._current(worker_id)
        if attempt is None:
            return
        now, member = time.monotonic(), worker_id.member
        if (
            member in attempt.watch.spared
        ):  # it was given up, and the others have gone on: it may not speak any more
            self._executor.signal(worker_id, signal.SIGKILL)
            return
        self._heartbeats.heard(member, now)
        self._tally.add(member, message, now)
        self._watch_progress(member, message, now)
        if isinstance(message, Failed):
            if (
                message.kind is FailureKind.PEER_LOST
                and attempt.watch.why_spared(member, 0, None)
                and self._spared(attempt, member, 0, message.summary)
            ):
                return
            if attempt.coordinator.is_newcomer(member):
                self._carry_out(attempt.coordinator.gone(member, f"raised {message.summary}", now))
            elif member in attempt.watch.crew:  # else it was given up, and complains that it lost us
                attempt.watch.failed(member, message, now)
        elif isinstance(message, WorkerEnded):
            attempt.watch.ended(member, message)
            if message.left:
                self._carry_out(attempt.coordinator.left(member, now))
            else:
                self._complete |= member in self._tally.finished
                if self._phase is not JobPhase.SUSPENDING:
                    self._enter(JobPhase.ENDING)
                self._carry_out(attempt.coordinator.over())
        elif isinstance(message, Started):
            self._obey(attempt.watch.began())
            if self._phase in (JobPhase.STARTING, JobPhase.RESUMING):
                self._enter(JobPhase.TRAINING)
            self._resumed(message, now)
        self._carry_out(self._coordinate(attempt.coordinator, member, message, now))
        if isinstance(message, Started):  # from now on a death is not the end
            self._carry_out([_Keep()])
        if self._curious and self._tally.steps:
            curious, self._curious = self._curious, []
            for asker in curious:
                asker.answer(self._status())
        self._observer.heard(member, message)

    def exited(self, worker_id: WorkerId, code: int, evidence: Evidence | None = None) -> None:
        """A worker's process has ended."""
        attempt = self._current(worker_id)
        if attempt is None:
            return
        now = time.monotonic()
        if worker_id.member not in attempt.watch.crew:
            self._carry_out(attempt.coordinator.gone(worker_id.member, _how(code), now))
        if worker_id.member in attempt.watch.crew:
            how = attempt.watch.why_spared(worker_id.member, code, evidence)
            if how is None or not self._spared(attempt, worker_id.member, code, how):
                attempt.watch.exited(worker_id.member, code, now, evidence)

    def _spared(self, attempt: _Attempt, member: int, code: int, how: str) -> bool:
        """A member has died. True: the others go on without it."""
        if self._complete:  # all have passed the last reduction, and one has said what came of it
            attempt.watch.spare(member, code)
            for other in attempt.watch.living:
                self._executor.tell(WorkerId(attempt.number, other), Terminate(final=True))
            return True
        instructions = attempt.coordinator.died((member,), f"worker {member} {how}", time.monotonic())
        if instructions is None:
            return False
        attempt.watch.spare(member, code)
        self._tally.may_repeat()
        self._carry_out(instructions)
        return True

    def lost(self, worker_id: WorkerId, why: str) -> None:
        """Nobody knows what has become of a worker, and nobody waits any longer."""
        attempt = self._current(worker_id)
        if attempt is None:
            return
        now = time.monotonic()
        if worker_id.member not in attempt.watch.crew:
            self._carry_out(attempt.coordinator.gone(worker_id.member, why, now))
        if worker_id.member in attempt.watch.crew:
            spared = attempt.watch.why_spared(worker_id.member, 0, None) is not None
            if not (spared and self._spared(attempt, worker_id.member, -signal.SIGKILL, f"was lost: {why}")):
                attempt.watch.lost(worker_id.member, why, now)

    def back(self, worker_id: WorkerId) -> None:
        """A worker can be reached again, whose agent was away."""
        attempt = self._current(worker_id)
        if attempt is not None:
            self._carry_out(attempt.coordinator.retell(worker_id.member))

    def signalled(self, number: int) -> None:
        """The user sent us a signal."""
        now = time.monotonic()
        if self._attempt is not None:
            self._obey(self._attempt.watch.asked(number, now))
        elif number != signal.SIGUSR1:  # what a suspended job has to keep, its checkpoint keeps
            self._end(
                self._tally.outcome(
                    now=now, exit_codes=self._codes, failure=None, stopped=True, stopped_by=number
                )
            )

    def asked(self, request: Request, asker: Requester) -> None:
        """Somebody wants something of the job."""
        now = time.monotonic()
        match request:
            case AskStatus(after_a_step=True) if not self._tally.steps:
                self._curious.append(asker)
            case AskStatus():
                asker.answer(self._status())
            case AskCheckpoint() | AskStop() if self._request.checkpoint is None:
                asker.answer(RequestResult(False, _NOWHERE))
            case AskCheckpoint() if self._attempt is None:
                asker.answer(
                    RequestResult(True, "suspended: its checkpoint holds everything", self._tally.step)
                )
            case AskCheckpoint():
                self.signalled(signal.SIGUSR1)
                asker.answer(RequestResult(True, "asked for, at the next boundary", self._tally.step))
            case AskStop():
                self.signalled(signal.SIGTERM)
                asker.answer(RequestResult(True, "asked for, at the next boundary", self._tally.step))
            case PullShard():
                self._to_do.append(_Tell(asker, self._shards.pull(request, now)))
            case OpenShards():
                refusal = self._shards.open(request)
                text = refusal or f"shards of {request.queues} are served"
                self._to_do.append(_Tell(asker, RequestResult(refusal is None, text)))
            case Scale(request=name, workers=workers) if self._replies.is_new(name, asker):
                self._change(Reconfiguration(workers=workers, reason="asked for", request=name), now)
            case ScaleBy(request=name, by=by, members=members) if self._replies.is_new(name, asker):
                workers = self._tally.workers + by
                self._change(
                    Reconfiguration(workers=workers, reason="asked for", request=name, without=members), now
                )
            case Occupy(request=name, slots=slots) if self._replies.is_new(name, asker):
                self._carry_out([*self._occupy(name, slots, now)])
            case ProfileJob(request=name) if self._replies.is_new(name, asker):
                self._profile(request, now)
            case Migrate(request=name, members=members) if self._replies.is_new(name, asker):
                workers = self._tally.workers
                self._change(
                    Reconfiguration(
                        workers=workers, reason="asked to migrate", request=name, without=members
                    ),
                    now,
                )

    def _occupy(self, name: str, slots: tuple[Slot, ...], now: float) -> Sequence[_ToDo]:
        """Run on these devices from the next boundary on. Where workers sit changes only if the change is begun."""
        device_assignment = self._request.device_assignment
        change = Reconfiguration(workers=len(slots), reason="given other devices", request=name)
        if device_assignment is None:
            return [
                ReconfigurationRefused(
                    change, "this job's devices are nobody's to choose: it was started without any"
                )
            ]
        coordinator = self._attempt.coordinator if self._attempt is not None else None
        if coordinator is not None and slots:
            if (busy := coordinator.busy()) is not None:
                return [ReconfigurationRefused(change, busy, retryable=True)]
            change = replace(change, without=device_assignment.aim(slots, coordinator.members))
        elif coordinator is None:
            device_assignment.aim(slots, ())
        self._change(change, now)
        return []

    def _profile(self, request: ProfileJob, now: float) -> None:
        if self._attempt is None or self._phase is JobPhase.SUSPENDING:
            reason = "the job is suspended: nothing runs that could be measured"
            self._carry_out([_Reply(request.request, RequestResult(False, reason, self._tally.step))])
            return
        wish = ProfileRequest(
            smallest=request.smallest, largest=request.largest, steps=request.steps, request=request.request
        )
        self._carry_out(self._attempt.coordinator.asked_to_profile(wish, now))

    def free(self, members: Sequence[int]) -> None:
        """The nodes of these workers are wanted for something else: the job goes on without them, or, if there are no others,
        on as many elsewhere. Asked again until it is so."""
        if self._attempt is None or self._phase is JobPhase.SUSPENDING:
            return
        coordinator = self._attempt.coordinator
        leaving = tuple(member for member in coordinator.members if member in members)
        if leaving and coordinator.busy() is None:
            workers = len(coordinator.members) - len(leaving) or len(leaving)
            change = Reconfiguration(workers=workers, reason="a node leaves", without=leaving)
            self._carry_out(coordinator.asked(change, time.monotonic()))

    def tick(self) -> None:
        """Time has passed, or something has happened."""
        self._work_off()
        now = time.monotonic()
        if self._next is not None and self._restart_at is not None and now >= self._restart_at:
            request, self._next, self._restart_at = self._next, None, None
            self._begin(request)
        if self._attempt is None or self._phase is JobPhase.ENDED:
            return
        self._obey(self._attempt.watch.orders(now))
        if not self._attempt.watch.ends:
            self._carry_out(self._attempt.coordinator.tick(now))
        self._look_for_silence(self._attempt, now)
        self._look_for_standstill(self._attempt, now)
        if self._attempt.watch.over and not self._to_do:
            self._conclude(self._attempt, now)

    def _look_for_silence(self, attempt: _Attempt, now: float) -> None:
        """Who does not answer is killed, for it may wake up later, and counts as dead at once."""
        if not attempt.coordinator.training or attempt.watch.ends:
            return
        expected = attempt.coordinator.expected
        if len(expected) == 1:
            return  # nobody waits for a lone worker
        # How long an agent may be away is not for the heartbeat to decide.
        expected = tuple(
            member for member in expected if self._executor.reaches(WorkerId(attempt.number, member))
        )
        asks, silent = self._heartbeats.look(expected, now)
        for member in silent:
            self._executor.signal(WorkerId(attempt.number, member), signal.SIGKILL)
            self.lost(WorkerId(attempt.number, member), f"silent for {self._heartbeats.patience:g} s")
        for member in expected if asks else ():
            self._executor.tell(WorkerId(attempt.number, member), Ping())

    def deadline(self) -> float | None:
        """When `tick` has something to do by itself."""
        heartbeats = self._heartbeats.deadline()
        lost = self._attempt.coordinator.deadline() if self._attempt is not None else None
        watch = self._attempt.watch.deadline() if self._attempt is not None else None
        retry = time.monotonic() + _RETRY_S if self._to_do else None
        standstill = self._watchdog.deadline() if self._watchdog is not None else None
        deadlines = (watch, retry, standstill, heartbeats, lost, self._restart_at)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def stopped_by_workers(self) -> bool:
        """Workers have stopped the job at a boundary, and nobody here had asked for it: their agent was away for too long."""
        watch = self._attempt.watch if self._attempt is not None else None
        return watch is not None and watch.stopped and watch.stopped_by is None

    def close(self) -> None:
        self._replies.close("the job has ended")

    def record(self) -> LeaderRecord:
        attempt = self._attempt
        request = attempt.request if attempt is not None else self._next or self._request
        return LeaderRecord(
            attempt=self._number,
            restarts=self._restarts,
            phase=self._phase,
            deaths=tuple(self._deaths),
            virtual_workers=self._tally.virtual_workers,
            placement=request.placement,
            schedule=tuple(request.schedule),
            coordinator=attempt.coordinator.record() if attempt is not None else None,
            step=self._suspended_at,
            suspending=self._suspending,
            resuming=self._resuming,
            answered=self._replies.answered,
            shards=self._shards.record(),
        )

    @property
    def _step(self) -> int:
        """The last complete step that is known of."""
        return max(self._tally.step, self._suspended_at)

    # Standstills.

    def _watch_progress(self, member: int, message: FromWorker, now: float) -> None:
        if self._watchdog is None:
            return
        match message:
            case Started() | StepReports():
                self._watchdog.progress(now)
            case Stacks(text=text):
                self._watchdog.answered(member, text)
            case WorkerEnded(left=False):
                self._watchdog.rest()

    def _look_for_standstill(self, attempt: _Attempt, now: float) -> None:
        if self._watchdog is None:
            return
        if self._watchdog.asks(attempt.watch.living, now):
            for member in attempt.watch.living:
                self._executor.signal(WorkerId(attempt.number, member), STACKS_SIGNAL)
        found = self._watchdog.finding(now)
        if found is None:
            return
        self._tally.stood_still(found, now)
        self._observer.stood_still(found)
        if found.ends:
            self._obey(attempt.watch.hangs(found.hanging))

    # Attempts.

    def _enter(self, phase: JobPhase) -> None:
        """The only place that changes the phase."""
        before, self._phase = self._phase, transition(self._phase, phase, JOB_TRANSITIONS)
        if phase is not before:
            fields = {"job": self._request.name, "attempt": self._number, "step": self._step}
            logger.info("%s after %s", phase, before, extra=fields)

    def _end(self, outcome: Outcome) -> None:
        self._enter(JobPhase.ENDED)
        self.outcome = outcome

    def _begin(self, request: RunRequest) -> None:
        self._number += 1
        self._enter(JobPhase.STARTING if self._resuming is None else JobPhase.RESUMING)
        placement = request.crew()
        members = tuple(range(placement.workers))
        if request.device_assignment is not None:
            request.device_assignment.begin(len(members))
        self._attempt = _Attempt(
            self._number,
            request,
            self._watch(members, request),
            Coordinator(
                placement.virtual_workers,
                members,
                store=self._store_of(self._number),
                schedule=request.changes(),
                placement=placement,
                pace=Pace(request.stragglers),
                recovers=request.recovers,
                min_workers=request.min_workers,
            ),
        )
        self._carry_out([_Launch(member) for member in members])

    def _watch(self, members: Sequence[int], request: RunRequest) -> WorkerTracker:
        """All attempts share the deaths: what kills one may kill the next."""
        return WorkerTracker(
            list(members),
            checkpoints=request.checkpoint is not None,
            deaths=self._deaths,
            poison_limit=request.poison_limit,
        )

    def _store_of(self, attempt: int) -> Callable[[int], str]:
        return lambda generation: self._executor.store(attempt, generation)

    def _current(self, worker_id: WorkerId) -> _Attempt | None:
        """What comes from an earlier start of the job does not count."""
        attempt = self._attempt
        return attempt if attempt is not None and attempt.number == worker_id.attempt else None

    def _conclude(self, attempt: _Attempt, now: float) -> None:
        """All workers of an attempt have gone: that was the job, or it goes on from its newest checkpoint, or later."""
        watch = attempt.watch
        self._codes = watch.codes
        if self._watchdog is not None:
            self._watchdog.rest()
        wanted = attempt.coordinator.wants
        self._carry_out(attempt.coordinator.over())
        cut = watch.stopped and self._tally.step == attempt.request.stop_after
        outcome = self._tally.outcome(
            now=now,
            exit_codes=watch.codes,
            failure=watch.failure() or (None if cut else watch.orphaned()),
            stopped=watch.stopped,
            stopped_by=watch.stopped_by,
            cut=cut,
        )
        died = outcome.failure is not None and outcome.failure.cause in _DIED
        suspends = self._phase is JobPhase.SUSPENDING and outcome.digest is None
        if suspends and (outcome.failure is None or died):
            self._suspend(now)
        elif died and (wait := self._waits(outcome)) is not None:
            assert outcome.failure is not None
            self._tally.died(outcome.failure, now)
            self._observer.died(outcome.failure, wait)
            self._enter(JobPhase.RESTARTING)
            self._attempt, self._restart_at = None, now + wait
            self._tally.workers = max(outcome.workers, wanted)
            self._next = attempt.request.again(outcome.virtual_workers, self._tally.workers)
            self.tick()
        else:
            self._end(outcome)

    def _waits(self, outcome: Outcome) -> float | None:
        """A job that checkpoints loses nothing by a death, unless it happens again and again: the seconds until it is started
        again; None if it is not."""
        if self._request.checkpoint is None or outcome.stopped_by is not None:
            return None
        return self._restarts.died(self._step)

    # Down to zero, and back.

    def _change(self, change: Reconfiguration, now: float) -> None:
        if (busy := _BUSY.get(self._phase)) is not None:
            self._carry_out([ReconfigurationRefused(change, busy, retryable=True)])
        elif self._phase is JobPhase.ENDED:
            self._carry_out([ReconfigurationRefused(change, "the job has ended")])
        elif self._attempt is None:
            self._resume(change, now)
        elif change.workers == 0 and not change.without:
            self._ask_to_suspend(self._attempt, change, now)
        else:
            self._carry_out(self._attempt.coordinator.asked(change, now))

    def _ask_to_suspend(self, attempt: _Attempt, change: Reconfiguration, now: float) -> None:
        assert change.request is not None
        busy = attempt.coordinator.busy()
        if self._request.checkpoint is None:
            self._carry_out(
                [ReconfigurationRefused(change, f"{_NOWHERE}, and without workers a job is its checkpoint")]
            )
        elif busy is not None:
            self._carry_out([ReconfigurationRefused(change, busy, retryable=True)])
        else:
            self._enter(JobPhase.SUSPENDING)
            self._suspending, self._since = ZeroScaleRequest(change.request, 0), now
            self._carry_out(attempt.watch.asked(signal.SIGTERM, now))

    def _suspend(self, now: float) -> None:
        assert self._suspending is not None
        self._enter(JobPhase.SUSPENDED)
        wanted, self._suspending, self._attempt = self._suspending, None, None
        self._tally.suspended(now)
        self._suspended_at = self._tally.step
        took = (now - self._since) * 1e3
        text = f"suspended after step {self._step}, until it is given workers again"
        self._carry_out([_Reply(wanted.request, RequestResult(True, text, self._step, 0, took, took))])

    def _resume(self, change: Reconfiguration, now: float) -> None:
        tally = self._tally
        if change.without or not 0 <= change.workers <= tally.virtual_workers:
            reason = f"the job is suspended; to go on, ask for 1 to {tally.virtual_workers} workers"
            self._carry_out([_Reply(change.request, RequestResult(False, reason, self._step))])
        elif change.workers == 0:
            self._carry_out([_Reply(change.request, RequestResult(True, "suspended already", self._step))])
        else:
            assert change.request is not None
            self._resuming, self._since = ZeroScaleRequest(change.request, change.workers), now
            tally.workers = change.workers
            self._begin(self._request.resumed(tally.virtual_workers, change.workers, self._step))

    def _resumed(self, message: Started, now: float) -> None:
        if self._resuming is None:
            return
        wanted, self._resuming = self._resuming, None
        took = now - self._since
        self._tally.resumed(message.step, now, took)
        text = f"{wanted.workers} workers since step {message.step}"
        answer = RequestResult(True, text, message.step, wanted.workers, took * 1e3, took * 1e3)
        self._carry_out([_Reply(wanted.request, answer)])

    # Instructions.

    def _coordinate(
        self, coordinator: Coordinator, member: int, message: FromWorker, now: float
    ) -> list[Instruction]:
        """What the coordinator makes of what a worker says."""
        match message:
            case Started(alike=alike, step=step, virtual_workers=number):
                return coordinator.started(alike, step, number or self._tally.virtual_workers, now)
            case StepReports(steps=steps):
                return coordinator.stepped(steps, now)
            case WorkerLeaving():
                assert self._attempt is not None
                self._attempt.watch.leaving(member, now + self._attempt.request.grace_s)
                return coordinator.leaves(member, now)
            case Ready(alike=alike):
                return coordinator.ready(member, alike, now)
            case GenerationPrepared(generation=generation):
                return coordinator.prepared(member, generation)
            case Switched(generation=generation, step=step, paused=paused, why_all=why_all):
                return coordinator.switched(member, generation, step, paused, now, why_all)
            case Recovered(generation=generation, placement=placement, again=again, paused=paused):
                return coordinator.recovered(member, generation, placement, again, paused, now)
            case PeerLossReported(generation=generation):
                coordinator.lost_by(generation, now)
        return []

    def _carry_out(self, instructions: Sequence[_ToDo]) -> None:
        """Answers are part of the record, and the record is kept before anything is done."""
        for instruction in instructions:
            if isinstance(instruction, _Reply):
                self._replies.note(instruction.request, instruction.answer)
            elif isinstance(instruction, ProfileDone):
                self._replies.note(instruction.wish.request, ProfileTable(instruction.rows))
            elif isinstance(instruction, ReconfigurationDone | ReconfigurationRefused):
                self._replies.note(instruction.change.request, self._answer(instruction))
        self._to_do += instructions
        self._work_off()

    def _work_off(self) -> None:
        """If the record cannot be kept now, what is to be done waits, and is tried again; workers train on."""
        if self._to_do and self._executor.keep(self.record):
            to_do, self._to_do = self._to_do, []
            for instruction in to_do:
                self._do(instruction)

    def _do(self, instruction: _ToDo) -> None:
        attempt, now = self._attempt, time.monotonic()
        match instruction:
            case SendSignal() as order:
                self._obey([order])
            case _Tell(asker=asker, reply=reply):
                asker.answer(reply)
            case _Reply(request=request, answer=answer):
                self._replies.answer(request, answer)
            case ReconfigurationDone() as done:
                if attempt is not None:
                    attempt.watch.joined(done.joined)
                if done.joined or done.before != done.after or done.change.counts is not None:
                    self._tally.resized(done, now)
                    self._observer.resized(done)
                self._replies.answer(done.change.request, self._answer(done))
            case ReconfigurationRefused(change=change, reason=reason, retryable=retryable) as refused:
                if not retryable:
                    self._tally.refused(change, reason, now)
                    self._observer.refused(change, reason)
                self._replies.answer(change.request, self._answer(refused))
            case ProfileDone(wish=wish, rows=rows):
                self._replies.answer(wish.request, ProfileTable(rows))
            case SurvivorsGoOn() as rescued:
                told = attempt.watch.told_of(rescued.lost) if attempt is not None else ()
                self._tally.recovered(rescued, str(self._request.recovery), told, now)
                self._observer.recovered(rescued)
            case StragglerNoticed(straggler=straggler):
                self._tally.noticed(straggler, now)
                self._observer.noticed(straggler)
            case GiveUp(reason=reason) if attempt is not None:
                attempt.watch.gave_up(reason, now)
            case StartNewcomer(member=member) | _Launch(member=member) if attempt is not None:
                if attempt.request.device_assignment is not None:
                    attempt.request.device_assignment.sit(member, attempt.coordinator.members)
                assignment = attempt.request.assignment(
                    member,
                    attempt.coordinator.store(FIRST_GENERATION),
                    joins=isinstance(instruction, StartNewcomer),
                    traces=self._executor.traces(attempt.number),
                )
                self._executor.start(WorkerId(attempt.number, member), assignment)
            case TellMember(member=member, message=message) if attempt is not None:
                self._executor.tell(WorkerId(attempt.number, member), message)
            case EndNewcomer(member=member) if attempt is not None:
                self._executor.signal(WorkerId(attempt.number, member), signal.SIGKILL)

    def _answer(self, result: ReconfigurationDone | ReconfigurationRefused) -> RequestResult:
        if isinstance(result, ReconfigurationRefused):
            workers = len(self._attempt.coordinator.members) if self._attempt is not None else 0
            return RequestResult(False, result.reason, self._tally.step, workers, retryable=result.retryable)
        text = f"{result.after} workers since step {result.step}"
        return RequestResult(
            True, text, result.step, result.after, result.paused * 1e3, result.prepared * 1e3
        )

    def _obey(self, orders: list[SendSignal]) -> None:
        assert self._attempt is not None
        for order in orders:
            for member in order.workers:
                worker_id = WorkerId(self._attempt.number, member)
                if order.signal == signal.SIGTERM and not self._request.reference:
                    # The signal itself would ask this one alone to leave.
                    self._executor.tell(worker_id, Terminate(final=self._attempt.watch.ends))
                else:
                    self._executor.signal(worker_id, order.signal)

    def _status(self) -> Status:
        tally = self._tally
        coordinator = self._attempt.coordinator if self._attempt is not None else None
        members = coordinator.members if coordinator is not None else ()
        return Status(
            name=self._request.name or "",
            program=self._request.program.name,
            pid=os.getpid(),
            virtual_workers=tally.virtual_workers,
            workers=len(members),
            members=members,
            generation=coordinator.generation if coordinator is not None else 0,
            phase=self._phase,
            reconfiguration=ReconfigurationPhase.STEADY if coordinator is None else coordinator.phase,
            step=self._step,
            loss=tally.steps[-1].loss if tally.steps else None,
            throughput=tally.rate() if coordinator is not None else None,
            devices=self._request.device_assignment.devices(members)
            if self._request.device_assignment is not None
            else (),
        )


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    return f"was killed by {signal.Signals(-code).name}"
