"""Requests and responses of the API, besides `cluster.records`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from gyrostat.cluster.job_spec import Workers
from gyrostat.cluster.records import EventRecord, JobRecord, JobState, LogSource, Waiting
from gyrostat.core.roles import MOST_SERVERS
from gyrostat.job.control.profiling import SizeMeasured

LONGEST_WAIT_S = 60
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_WAIT_S)]
Position = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Lines = Annotated[int, Meta(ge=0, le=100_000)]
Short = Annotated[str, Meta(max_length=64)]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Which service this is."""

    version: str
    api: str
    trouble: str | None
    """Why the cluster does not work as it should; null: it does."""


# Queries.


class JobsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ended: Annotated[bool, Meta(description="Also those that are over.")] = True
    state: Annotated[JobState | None, Meta(description="Only those in this state.")] = None
    tenant: Annotated[Short | None, Meta(description="Only this tenant's.")] = None


class LogsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: Annotated[LogSource, Meta(description="Which log.")] = LogSource.OUTPUT
    after: Annotated[
        Short | None, Meta(description="Continue after this position: `next` of an earlier response.")
    ] = None
    tail: Annotated[Lines | None, Meta(description="Begin with this number of last lines.")] = None
    wait: Annotated[Seconds, Meta(description="Seconds to wait for new lines if there are none.")] = 0


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    since: Annotated[Position, Meta(description="Those after this number.")] = 0
    limit: Annotated[int, Meta(description="Maximal number of events.", ge=1, le=10_000)] = 1_000
    wait: Annotated[Seconds, Meta(description="Seconds to wait for an event if there is none.")] = 0


# Bodies.


class Empty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object."""


class ScaleBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From now on the job runs on `min` to `max` devices, and with `servers` parameter servers; null: as before."""

    min: Workers | None = None
    max: Workers | None = None
    servers: Annotated[int, Meta(ge=1, le=MOST_SERVERS)] | None = None


class MigrateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replace these workers by new ones; all if none is named."""

    workers: Annotated[tuple[Position, ...], Meta(max_length=10_000)] = ()


class ProfileBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measure the job on sizes from `smallest` to `largest`, or on its current size."""

    smallest: Workers | None = None
    largest: Workers | None = None
    steps: Annotated[int, Meta(ge=1, le=100_000)] = 20


class ReserveBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reserve this number of devices of a type for serving loads, in all; 0 releases them."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]
    devices: Annotated[int, Meta(ge=0, le=1_000_000)]
    wait: Seconds = 0
    """Maximal number of seconds to wait until they are free."""


class ShutdownBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End the daemon."""

    checkpoint: bool = True
    """Jobs checkpoint and wait for the next daemon; otherwise they train on and are adopted by it."""


# Responses.


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job, and if it waits, why."""

    job: JobRecord
    waiting: Waiting | None


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """In the order of submission."""

    jobs: tuple[JobRecord, ...]


class LogPart(msgspec.Struct, frozen=True, kw_only=True):
    """The next lines of a log."""

    lines: tuple[str, ...]
    next: str
    """For `after`: the position after these lines."""
    over: bool
    """The job has ended, and these were its last lines."""


class Events(msgspec.Struct, frozen=True, kw_only=True):
    events: tuple[EventRecord, ...]
    next: int
    """For `since`: the last number that was read."""


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a request to a running job."""

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
    """The job on it; null if there is none, or one that you may not see."""
    tenant: str | None
    borrowed: bool


class Reservations(msgspec.Struct, frozen=True, kw_only=True):
    devices: dict[str, int]
    """Reserved for serving loads, by type."""
    free: bool
    """Whether jobs have left all of them."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the cluster: what `gyrostat top` shows."""

    version: str
    now: float
    trouble: str | None
    virtual_clusters: tuple[str, ...]
    reservations: dict[str, int]
    devices: tuple[Device, ...]
    jobs: tuple[JobRecord, ...]
    """Those that are not over."""
    waiting: tuple[Waiting, ...]
    """Why jobs wait: the first of every queue, then the second, and so on."""
    ended: dict[str, int]
    """How many are over, by state."""
