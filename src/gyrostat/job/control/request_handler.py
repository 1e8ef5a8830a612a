"""What the leader does with each request of a client. See `requests` for the messages."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gyrostat.core.phase import JobPhase
from gyrostat.job.control.actions import ActionQueue, ReplyOnce, ReplyTo
from gyrostat.job.control.attempt import Attempt
from gyrostat.job.control.device_assignment import Slot, counts_by_pace
from gyrostat.job.control.instructions import Reconfiguration, ReconfigurationRefused
from gyrostat.job.control.outcome import Tally
from gyrostat.job.control.profiling import ProfileRequest
from gyrostat.job.control.replies import IdempotentReplies, Requester, Result
from gyrostat.job.control.requests import (
    AskCheckpoint,
    AskStatus,
    AskStop,
    Migrate,
    Occupy,
    ProfileJob,
    Request,
    RequestResult,
    Scale,
    ScaleBy,
    ScaleRoles,
    Status,
    Vacate,
)
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.control.shard_service import OpenShards, PullShard, QueuesRecord, ShardService

_NO_CHECKPOINTS = "it was started without --checkpoint-dir"
_NO_DEVICES = "the devices of this job cannot be chosen: it was started without a list of devices"
_NO_SERVERS = "the job has no parameter servers: it was started without --servers; give a number of workers: scale JOB 4"
_BUSY = {
    JobPhase.WAITING_FOR_NODES: "the job has not begun yet; retry",
    JobPhase.RESTARTING: "busy: the job is about to be started again; retry",
    JobPhase.SUSPENDING: "busy: the job is being suspended; retry",
    JobPhase.ENDING: "busy: the job is about to end; retry",
}


class SteeredJob(Protocol):
    """What requests need of a leader."""

    @property
    def phase(self) -> JobPhase: ...

    @property
    def attempt(self) -> Attempt | None: ...

    def status(self) -> Status: ...

    def signalled(self, number: int) -> None: ...

    def suspend(self, request: str, now: float) -> None: ...

    def resume(self, request: str, workers: int, now: float) -> None: ...


class RequestHandler:
    def __init__(
        self,
        job: SteeredJob,
        request: RunRequest,
        tally: Tally,
        replies: IdempotentReplies,
        actions: ActionQueue,
    ) -> None:
        self._job, self._request, self._tally, self._actions = job, request, tally, actions
        self.replies, self.shards = replies, ShardService()
        self._await_first_step: list[Requester] = []

    def restore(self, answered: Mapping[str, Result], shards: dict[str, QueuesRecord], now: float) -> None:
        """As the previous leader left them."""
        self.replies.restore(answered)
        self.shards = ShardService.restore(shards, now)

    def handle(self, request: Request, requester: Requester) -> None:
        now = time.monotonic()
        match request:
            case AskStatus(after_a_step=True) if not self._tally.steps:
                self._await_first_step.append(requester)
            case AskStatus():
                requester.answer(self._job.status())
            case AskCheckpoint() | AskStop():
                requester.answer(self._signal(request))
            case PullShard():
                self._actions.defer(ReplyOnce(requester, self.shards.pull(request, now)))
            case OpenShards():
                refusal = self.shards.open(request)
                text = refusal or f"shards of {request.queues} are served"
                self._actions.defer(ReplyOnce(requester, RequestResult(refusal is None, text)))
            case Vacate(devices=devices):
                self._vacate(devices, now)
                requester.answer(self._job.status())
            case ScaleRoles(request=name):
                if self.replies.is_new(name, requester):
                    self._actions.carry_out([ReplyTo(name, RequestResult(False, _NO_SERVERS, invalid=True))])
            case Scale() | ScaleBy() | Migrate() | Occupy() | ProfileJob():
                if self.replies.is_new(request.request, requester):
                    self._handle_change(request, now)

    def free(self, members: Sequence[int]) -> None:
        """The nodes of these workers leave: the job goes on without them, or, if it has no others, on as many elsewhere."""
        attempt = self._job.attempt
        if attempt is None or self._job.phase is JobPhase.SUSPENDING:
            return
        coordinator = attempt.coordinator
        leaving = tuple(member for member in coordinator.members if member in members)
        if leaving and coordinator.busy() is None:
            workers = len(coordinator.members) - len(leaving) or len(leaving)
            change = Reconfiguration(workers=workers, reason="a node leaves", without=leaving)
            self._actions.carry_out(coordinator.request_change(change, time.monotonic()))

    def stepped(self) -> None:
        """A step may be complete: some clients wait for the first one."""
        if self._await_first_step and self._tally.steps:
            waiting, self._await_first_step = self._await_first_step, []
            for requester in waiting:
                requester.answer(self._job.status())

    def _signal(self, request: AskCheckpoint | AskStop) -> RequestResult:
        if self._request.options.checkpoint is None:
            ends = "; Ctrl-C in its terminal, or SIGINT to its process, ends it without one"
            advice = ends if isinstance(request, AskStop) else ""
            return RequestResult(False, f"the job cannot checkpoint: {_NO_CHECKPOINTS}{advice}")
        if isinstance(request, AskCheckpoint) and self._job.attempt is None:
            return RequestResult(True, "suspended: its checkpoint holds everything", self._tally.step)
        if isinstance(request, AskCheckpoint):
            self._job.signalled(signal.SIGUSR1)
            return RequestResult(
                True, "a checkpoint will be taken at the next step boundary", self._tally.step
            )
        self._tally.stop_requested = True
        self._job.signalled(signal.SIGTERM)
        return RequestResult(
            True, "the job will be checkpointed and ended at the next step boundary", self._tally.step
        )

    def _handle_change(self, request: Scale | ScaleBy | Migrate | Occupy | ProfileJob, now: float) -> None:
        name, workers = request.request, self._tally.workers
        match request:
            case Scale(workers=wanted):
                self._change(Reconfiguration(workers=wanted, reason="requested", request=name), now)
            case ScaleBy(by=by, members=members):
                change = Reconfiguration(
                    workers=workers + by, reason="requested", request=name, without=members
                )
                self._change(change, now)
            case Migrate(members=members):
                change = Reconfiguration(
                    workers=workers, reason="asked to migrate", request=name, without=members
                )
                self._change(change, now)
            case Occupy(slots=slots):
                self._occupy(name, slots, now)
            case ProfileJob():
                self._profile(request, now)

    def _change(self, change: Reconfiguration, now: float) -> None:
        phase, attempt = self._job.phase, self._job.attempt
        if (busy := _BUSY.get(phase)) is not None:
            self._refuse(change, busy, retryable=True)
        elif phase is JobPhase.ENDED:
            self._refuse(change, "the job has ended")
        elif attempt is None:
            self._resume(change, now)
        elif change.workers == 0 and not change.without:
            self._suspend(attempt, change, now)
        else:
            self._actions.carry_out(attempt.coordinator.request_change(change, now))

    def _suspend(self, attempt: Attempt, change: Reconfiguration, now: float) -> None:
        assert change.request is not None
        busy = attempt.coordinator.busy()
        if self._request.options.checkpoint is None:
            self._refuse(
                change, f"the job cannot be suspended, because its state would be lost: {_NO_CHECKPOINTS}"
            )
        elif busy is not None:
            self._refuse(change, busy, retryable=True)
        else:
            self._job.suspend(change.request, now)

    def _resume(self, change: Reconfiguration, now: float) -> None:
        step, most = self._job.status().step, self._tally.virtual_workers
        if change.without or not 0 <= change.workers <= most:
            reason = f"the job is suspended; to go on, ask for 1 to {most} workers"
            self._actions.carry_out(
                [ReplyTo(change.request, RequestResult(False, reason, step, invalid=True))]
            )
        elif change.workers == 0:
            self._actions.carry_out([ReplyTo(change.request, RequestResult(True, "suspended already", step))])
        else:
            assert change.request is not None
            self._job.resume(change.request, change.workers, now)

    def _occupy(self, name: str, slots: tuple[Slot, ...], now: float) -> None:
        """Run on these devices from the next boundary on. The assignment changes only if the change begins."""
        devices, attempt = self._request.device_assignment, self._job.attempt
        change = Reconfiguration(workers=len(slots), reason="given other devices", request=name)
        if devices is None:
            self._refuse(change, _NO_DEVICES)
            return
        if attempt is not None and slots:
            if (busy := attempt.coordinator.busy()) is not None:
                self._refuse(change, busy, retryable=True)
                return
            members = attempt.coordinator.members
            leaving = devices.retarget(slots, members)
            staying = tuple(member for member in members if member not in leaving)
            total = attempt.coordinator.generations.virtual_workers
            change = replace(
                change, without=leaving, counts=counts_by_pace(total, devices.after(staying)[: len(slots)])
            )
        elif attempt is None:
            devices.retarget(slots, ())
        self._change(change, now)

    def _vacate(self, devices: tuple[int, ...], now: float) -> None:
        """Its workers on these devices have not left in time: the others recover, and nobody takes their place. If none could
        go on, nothing is done, and the client kills the job."""
        assignment, attempt = self._request.device_assignment, self._job.attempt
        if assignment is None or attempt is None or not self._request.options.recovers:
            return
        coordinator = attempt.coordinator
        evicted = assignment.on(devices, (*coordinator.members, *coordinator.generations.newcomers))
        if not coordinator.training or set(coordinator.members) <= set(evicted):
            return
        assignment.withdraw(devices)
        for member in evicted:
            self._actions.carry_out(coordinator.leaves(member, now))
            if member in attempt.tracker.living:
                attempt.tracker.leaving(member, now, "was evicted: it had not left its device in time")

    def _profile(self, request: ProfileJob, now: float) -> None:
        attempt = self._job.attempt
        if attempt is None or self._job.phase is JobPhase.SUSPENDING:
            answer = RequestResult(
                False, "the job is suspended: nothing runs that could be measured", self._tally.step
            )
            self._actions.carry_out([ReplyTo(request.request, answer)])
            return
        profile = ProfileRequest(
            smallest=request.smallest, largest=request.largest, steps=request.steps, request=request.request
        )
        self._actions.carry_out(attempt.coordinator.request_profile(profile, now))

    def _refuse(self, change: Reconfiguration, reason: str, *, retryable: bool = False) -> None:
        self._actions.carry_out([ReconfigurationRefused(change, reason, retryable)])
