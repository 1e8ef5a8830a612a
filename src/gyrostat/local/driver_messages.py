"""What drivers report to the cluster: messages for the inbox of the scheduling loop's thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gyrostat.cluster.attempt import AttemptResult
from gyrostat.cluster.occupancy import Holder
from gyrostat.core.devices import Devices
from gyrostat.job.control.requests import Status


@dataclass(frozen=True)
class StatusSeen:
    """A job has reported its status."""

    job: str
    status: Status


@dataclass(frozen=True)
class JobMoved:
    """A job runs on other devices now."""

    job: str
    before: Devices
    after: Devices
    pause_ms: float


@dataclass(frozen=True)
class ServersScaled:
    """A job has another number of parameter servers now."""

    job: str
    reason: str


@dataclass(frozen=True)
class MoveFailed:
    """A job could not move, and trains where it is. The driver tries again."""

    job: str
    reason: str


@dataclass(frozen=True)
class HostGone:
    """No host has the job any more. No result: its host was killed."""

    job: str
    attempt: int
    result: AttemptResult | None
    began: bool = True
    """False: its target became empty before it was started."""
    evicted: str | None = None
    """Why the cluster killed its host, if it did."""


@dataclass(frozen=True)
class JobEvicted:
    """A job has not left devices in time, and is made to."""

    job: str
    devices: Devices
    reason: str


@dataclass(frozen=True)
class JobBlocked:
    """A job waits to be started: these have yet to leave its devices."""

    job: str
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class DriverTrouble:
    """The driver has failed unexpectedly. It tries again."""

    job: str
    reason: str


DriverMessage: TypeAlias = (
    StatusSeen | JobMoved | ServersScaled | MoveFailed | JobEvicted | JobBlocked | HostGone | DriverTrouble
)
