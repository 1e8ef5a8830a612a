"""What requests and answers of the API consist of, besides the records of `local.records`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from gyrostat.cluster.records import EventRecord, JobRecord, JobState, LogSource, Waiting
from gyrostat.job.control.profiling import SizeMeasured

LONGEST_WAIT_S = 60
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_WAIT_S)]
Workers = Annotated[int, Meta(ge=1, le=1_000_000)]
Position = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Lines = Annotated[int, Meta(ge=0, le=100_000)]
Short = Annotated[str, Meta(max_length=64)]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Which service this is."""

    version: str
    api: str
    trouble: str | None
    """What keeps the cluster from working as it should; null if nothing does."""


# Queries.


class JobsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ended: Annotated[bool, Meta(description="Also those that are over.")] = True
    state: Annotated[JobState | None, Meta(description="Only those in this state.")] = None
    tenant: Annotated[Short | None, Meta(description="Only this tenant's.")] = None


class LogsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: Annotated[LogSource, Meta(description="Which log.")] = LogSource.OUTPUT
    after: Annotated[
        Short | None, Meta(description="Go on after this place: `next` of an earlier answer.")
    ] = None
    tail: Annotated[Lines | None, Meta(description="Begin with the last lines, so many.")] = None
    wait: Annotated[Seconds, Meta(description="If there is nothing new, wait so many seconds for it.")] = 0


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    since: Annotated[Position, Meta(description="Those after this number.")] = 0
    limit: Annotated[int, Meta(description="At most so many.", ge=1, le=10_000)] = 1_000
    wait: Annotated[Seconds, Meta(description="If there is none, wait so many seconds for one.")] = 0


# Bodies.


class Empty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object: all is said by the path."""


class ScaleBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From now on the job runs on `min` to `max` devices."""

    min: Workers
    max: Workers


class MigrateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replace these workers by new ones; all if none is named."""

    workers: Annotated[tuple[Position, ...], Meta(max_length=10_000)] = ()


class ProfileBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measure the job on sizes from `smallest` to `largest`, or on the size that it has."""

    smallest: Workers | None = None
    largest: Workers | None = None
    steps: Annotated[int, Meta(ge=1, le=100_000)] = 20


class ReserveBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Have so many devices of this type for a serving load, in all; 0 gives them back."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]
    devices: Annotated[int, Meta(ge=0, le=1_000_000)]
    wait: Seconds = 0
    """Until they are free, at most so many seconds."""


class ShutdownBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End the daemon."""

    checkpoint: bool = True
    """Jobs checkpoint and wait for the next daemon; otherwise they train on and are found again."""


# Answers.


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and if it waits, why."""

    job: JobRecord
    waiting: Waiting | None


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """In the order in which they were submitted."""

    jobs: tuple[JobRecord, ...]


class LogPart(msgspec.Struct, frozen=True, kw_only=True):
    """The next lines of a log."""

    lines: tuple[str, ...]
    next: str
    """For `after`: where this part ends."""
    over: bool
    """There will be no more: the job has ended, and this was the last."""


class Events(msgspec.Struct, frozen=True, kw_only=True):
    events: tuple[EventRecord, ...]
    next: int
    """For `since`: the last number that was looked at."""


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of asking a running job for something."""

    text: str
    step: int
    workers: int
    pause_ms: float
    prepare_ms: float


class ProfileResult(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[SizeMeasured, ...]


class Use(StrEnum):
    FREE = "free"
    BUSY = "busy"
    RESERVED = "reserved"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device, or CPU slot."""

    id: int
    name: str
    type: str
    node: str
    cell: str
    use: Use
    pace: float | None
    cpus: float | None
    memory: int | None
    job: str | None
    """Who is on it; null if nobody is, or a job that you may not see."""
    tenant: str | None
    borrowed: bool


class Reservations(msgspec.Struct, frozen=True, kw_only=True):
    devices: dict[str, int]
    """By type: what serving loads have."""
    free: bool
    """Whether jobs have left all of them."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at a glance: what `gyrostat top` shows."""

    version: str
    now: float
    trouble: str | None
    virtual_clusters: tuple[str, ...]
    reservations: dict[str, int]
    devices: tuple[Device, ...]
    jobs: tuple[JobRecord, ...]
    """Those that are not over."""
    waiting: tuple[Waiting, ...]
    """Why jobs wait: the first of every queue."""
    ended: dict[str, int]
    """How many are over, by state."""
