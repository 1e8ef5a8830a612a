"""What a server job does with each request of a client. See `job.control.requests` for the messages.

One change of its size is under way at a time; another one is refused for now. It is answered when all workers that should train
do, nobody else is left, and the slots are where they should be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gyrostat.core.roles import MOST_SERVERS
from gyrostat.job.control.device_assignment import Slot
from gyrostat.job.control.replies import IdempotentReplies, Requester
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
from gyrostat.job.control.run_request import MOST_WORKERS
from gyrostat.job.control.shard_service import OpenShards, PullShard

_NO_CHECKPOINTS = "the job has nowhere to checkpoint: it was started without --checkpoint-dir"
_NO_DEVICES = "this job's devices are nobody's to choose: it was started without any"
_NO_PROFILE = "a job with parameter servers is not profiled; `gyrostat status` shows its throughput"
_NO_SHARDS = "this job's shards are those of its own workers: job.shards"


class SteeredServerJob(Protocol):
    """What requests need of the leader."""

    @property
    def checkpoints(self) -> bool: ...

    @property
    def members(self) -> tuple[int, ...]: ...

    @property
    def servers(self) -> int: ...

    @property
    def busy(self) -> str | None:
        """Why no change can be made now."""

    @property
    def has_devices(self) -> bool: ...

    def status(self) -> Status: ...

    def request_checkpoint(self) -> None: ...

    def stop(self) -> None: ...

    def change(self, change: SizeChange) -> None: ...

    def occupy(self, change: SizeChange, slots: tuple[Slot, ...]) -> None: ...

    def vacate(self, devices: tuple[int, ...]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SizeChange:
    """Another number of workers or servers."""

    request: str
    workers: int
    servers: int
    leaving: tuple[int, ...] = ()
    """Workers that are replaced or leave."""
    reason: str = "asked for"


class ServerRequests:
    def __init__(self, job: SteeredServerJob, replies: IdempotentReplies) -> None:
        self._job, self._replies = job, replies
        self._await_first_update: list[Requester] = []

    def handle(self, request: Request, requester: Requester) -> None:
        job = self._job
        match request:
            case AskStatus(after_a_step=True) if not job.status().step:
                self._await_first_update.append(requester)
            case AskStatus():
                requester.answer(job.status())
            case AskCheckpoint() | AskStop():
                requester.answer(self._save(request))
            case Vacate(devices=devices):
                job.vacate(devices)
                requester.answer(job.status())
            case OpenShards() | PullShard():
                requester.answer(RequestResult(False, _NO_SHARDS, invalid=True))
            case Scale() | ScaleBy() | ScaleRoles() | Migrate() | Occupy() | ProfileJob():
                if self._replies.is_new(request.request, requester):
                    self._handle_change(request)

    def updated(self) -> None:
        """The first update may be done: some clients wait for it."""
        waiting, self._await_first_update = self._await_first_update, []
        for requester in waiting:
            requester.answer(self._job.status())

    def _save(self, request: AskCheckpoint | AskStop) -> RequestResult:
        step = self._job.status().step
        if not self._job.checkpoints:
            return RequestResult(False, _NO_CHECKPOINTS, step)
        if isinstance(request, AskCheckpoint):
            self._job.request_checkpoint()
            return RequestResult(True, "a checkpoint is being written while training goes on", step)
        self._job.stop()
        return RequestResult(
            True, "workers end after the batches they run; then the job is checkpointed and ends", step
        )

    def _handle_change(self, request: Scale | ScaleBy | ScaleRoles | Migrate | Occupy | ProfileJob) -> None:
        workers, servers = len(self._job.members), self._job.servers
        name = request.request
        match request:
            case Scale(workers=wanted):
                self._change(SizeChange(request=name, workers=wanted, servers=servers))
            case ScaleBy(by=by, members=members):
                self._change(SizeChange(request=name, workers=workers + by, servers=servers, leaving=members))
            case ScaleRoles():
                self._change(_by_roles(request, workers, servers))
            case Migrate(members=members):
                self._change(
                    SizeChange(
                        request=name,
                        workers=workers,
                        servers=servers,
                        leaving=members,
                        reason="asked to migrate",
                    )
                )
            case Occupy(slots=slots):
                if not self._job.has_devices:
                    self._replies.answer(name, RequestResult(False, _NO_DEVICES))
                    return
                change = SizeChange(
                    request=name, workers=len(slots), servers=servers, reason="given other devices"
                )
                self._change(change, lambda: self._job.occupy(change, slots))
            case ProfileJob():
                self._replies.answer(name, RequestResult(False, _NO_PROFILE, invalid=True))

    def _change(self, change: SizeChange, carry_out: Callable[[], None] | None = None) -> None:
        refusal = self._refusal(change)
        if refusal is not None:
            self._replies.answer(change.request, RequestResult(False, refusal, invalid=True))
        elif (busy := self._job.busy) is not None:
            self._replies.answer(change.request, RequestResult(False, busy, retryable=True))
        elif carry_out is not None:
            carry_out()
        else:
            self._job.change(change)

    def _refusal(self, change: SizeChange) -> str | None:
        unknown = [member for member in change.leaving if member not in self._job.members]
        if unknown:
            numbers = ", ".join(map(str, self._job.members)) or "none"
            return f"the job has no worker {unknown[0]}; it has {numbers}"
        if not 0 <= change.workers <= MOST_WORKERS:
            return f"the job can have 0 to {MOST_WORKERS} workers, and would have {change.workers}"
        if not 1 <= change.servers <= MOST_SERVERS:
            return f"the job can have 1 to {MOST_SERVERS} servers, and would have {change.servers}"
        return None


def _by_roles(request: ScaleRoles, workers: int, servers: int) -> SizeChange:
    if request.relative:
        return SizeChange(
            request=request.request,
            workers=workers + (request.workers or 0),
            servers=servers + (request.servers or 0),
        )
    return SizeChange(
        request=request.request,
        workers=workers if request.workers is None else request.workers,
        servers=servers if request.servers is None else request.servers,
    )
