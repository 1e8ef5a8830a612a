"""The decisions of a scheduler: start, resize and preempt, each with its reason. Clusters carry them out.

An action names the job's complete set of devices, so applying a plan is idempotent. The actions are in an order in which
they can be carried out one by one: those that release devices precede those that take them.

File format: recordings (`sched.recording`) contain the names of these classes and fields. Do not rename them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gyrostat.core.devices import Devices
from gyrostat.core.request import JobId


@dataclass(frozen=True, slots=True)
class Start:
    """Start a waiting job on these devices."""

    job: JobId
    devices: Devices
    reason: str
    borrowed: Devices = ()
    """The subset of `devices` that belongs to other VCs and may be reclaimed."""
    shares_with: JobId | None = None
    """The job that runs on the same devices. When it ends or leaves them, this job has them alone."""


@dataclass(frozen=True, slots=True)
class Resize:
    """Continue a running job on these devices: more, fewer, or others (a migration)."""

    job: JobId
    before: Devices
    devices: Devices
    reason: str
    borrowed: Devices = ()

    @property
    def shrinks(self) -> bool:
        """Whether it only releases devices."""
        return set(self.devices) <= set(self.before)

    @property
    def migrates(self) -> bool:
        return len(self.devices) == len(self.before) and self.devices != self.before


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take all devices from a job. The job keeps its state and waits."""

    job: JobId
    before: Devices
    reason: str


Action: TypeAlias = Start | Resize | Preempt


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions of one tick."""

    now: float
    actions: tuple[Action, ...] = ()
    wake_at: float | None = None
    """Decide again at this time even if nothing changes until then."""
