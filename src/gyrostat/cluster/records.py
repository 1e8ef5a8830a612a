"""Jobs, devices and events of a cluster, as its database, its API and its clients exchange them.

`job_spec.JobSpec` is what an owner submits, `JobRecord` its state and progress. A job's state changes along `NEXT` only:

    queued → starting → running → finished
                ↑           ↓ ↘ failed
             suspended ← (preempted)

A `suspended` job was running and lost its devices: it waits in the queue with its checkpoint. A `paused` job was taken out
of the queue by its owner. `finished`, `failed` and `cancelled` are final.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.core.errors import WrongState

DEFAULT_VC = "default"


class JobState(StrEnum):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in _ENDS

    @property
    def waits(self) -> bool:
        """In the queue, with or without a checkpoint."""
        return self in (JobState.QUEUED, JobState.SUSPENDED)


_ENDS = frozenset({JobState.FINISHED, JobState.FAILED, JobState.CANCELLED})
_ANY_END = (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)
NEXT: Mapping[JobState, tuple[JobState, ...]] = {
    JobState.QUEUED: (JobState.STARTING, JobState.PAUSED, *_ANY_END),
    JobState.STARTING: (
        JobState.RUNNING,
        JobState.QUEUED,
        JobState.SUSPENDED,
        JobState.PAUSED,
        *_ANY_END,
    ),
    JobState.RUNNING: (
        JobState.STARTING,
        JobState.QUEUED,
        JobState.SUSPENDED,
        JobState.PAUSED,
        *_ANY_END,
    ),
    JobState.SUSPENDED: (JobState.STARTING, JobState.QUEUED, JobState.PAUSED, *_ANY_END),
    JobState.PAUSED: (JobState.QUEUED, JobState.SUSPENDED, *_ANY_END),
    JobState.FINISHED: (),
    JobState.FAILED: (),
    JobState.CANCELLED: (),
}
"""Which state may follow which."""


class Intent(StrEnum):
    """What the owner of a job has requested. Durable: it survives the daemon."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job, its state and its progress. Times are seconds since the epoch."""

    id: str
    number: int
    """Of its submission: 1, 2, 3 …"""
    name: str
    tenant: str
    vc: str
    spec: JobSpec
    state: JobState = JobState.QUEUED
    intent: Intent = Intent.RUN
    reason: str = ""
    """Why it is in this state."""
    beneath: tuple[tuple[str, ...], ...] = ()
    """Of each of these groups, one directory must be above its working directory and script, whenever a worker starts."""
    submitted: float = 0.0
    changed: float = 0.0
    """When its state last changed."""
    started: float | None = None
    """When it first got devices."""
    finished: float | None = None
    ran: float = 0.0
    """Seconds with devices, up to when its state last changed."""
    devices: tuple[int, ...] = ()
    """Those it holds: ids of `DeviceRecord`s."""
    borrowed: tuple[int, ...] = ()
    """Those of them that may be taken back at any time."""
    workers: int = 0
    servers: int = 0
    """Parameter servers that it runs on now."""
    step: int = 0
    loss: float | None = None
    throughput: float | None = None
    """Samples per second of the last few seconds."""
    attempts: int = 0
    """How often it was started: first start, after suspensions, after failures."""
    retries: int = 0
    """How often of these because it had failed."""
    worker_deaths: int = 0
    """How many of its workers have died; those that were evicted count, too."""
    incidents: int = 0
    """How many lines of its host's record of such incidents have become events."""
    not_before: float | None = None
    """A failed job is not tried again before."""
    failed_at: int | None = None
    """The step after which it last failed."""
    failure: str | None = None
    """The error with which it last failed."""
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()
    """Its last lines of output, once it has failed."""
    digest: str | None = None
    """Of all tracked state, once it has finished."""
    defect: str | None = None
    """Why the daemon cannot run it: the database has values of it that are not allowed (any more). It is stopped, and fails."""

    def moved(self, state: JobState, reason: str, now: float, **fields: Any) -> JobRecord:
        """The same job in another state."""
        if state is not self.state and state not in NEXT[self.state]:
            raise WrongState(f"job {self.id} is {self.state}; it cannot become {state}")
        ran = self.ran + (max(0.0, now - self.changed) if self.holds_devices else 0.0)
        return msgspec.structs.replace(self, state=state, reason=reason, changed=now, ran=ran, **fields)

    @property
    def holds_devices(self) -> bool:
        return self.state in (JobState.STARTING, JobState.RUNNING)

    def ran_by(self, now: float) -> float:
        """Seconds with devices so far."""
        return self.ran + (max(0.0, now - self.changed) if self.holds_devices else 0.0)


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One device, or CPU slot, and the job on it."""

    id: int
    name: str
    """Machine and position: `cpu-0/2`."""
    type: str
    node: str
    cell: str
    """Its cells, from the largest: `rack-0/node-1`."""
    pace: float | None = None
    """Samples per second of a paced slot, which sleeps instead of computing."""
    cpus: float | None = None
    memory: int | None = None
    job: str | None = None
    """The job whose worker is on it now."""
    tenant: str | None = None
    borrowed: bool = False
    reserved: bool = False
    """Taken by `reserve`, for a serving load."""


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A decision or an occurrence, with its reason."""

    number: int
    """1, 2, 3 …: `events(since=number)` goes on after it."""
    at: float
    """Seconds since the epoch."""
    kind: str
    """submitted, started, resized, preempted, finished, failed, cancelled, paused, resumed, retried, reserved, released,
    adopted, moved, not moved, blocked, evicted, worker died,
    recovered, workers restart, trouble …"""
    job: str | None
    tenant: str | None
    reason: str
    before: tuple[int, ...] = ()
    """Devices."""
    after: tuple[int, ...] = ()


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job does not run, and what would let it run."""

    job: str
    position: int
    """In its virtual cluster's queue; 1 is next."""
    why: str
    what_helps: str


class LogSource(StrEnum):
    OUTPUT = "output"
    """What its workers print, line by line: `[worker] line`."""
    HOST = "host"
    """Messages of the process that runs it."""
    METRICS = "metrics"
    """What its script passes to `job.log`: one JSON object per line, {"step": 3, "metrics": {"loss": 0.5}}."""
    CURVES = "curves"
    """Loss and throughput over time: one JSON object per line and second (`curves.Point`)."""


class LogChunk(msgspec.Struct, frozen=True):
    """Consecutive lines of a log."""

    lines: tuple[str, ...]
    next: str
    """The position after them."""
    complete: bool
    """The log has no more lines now."""
