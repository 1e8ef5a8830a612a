"""What a scheduler decided: start, resize, preempt, each with its reason. Clusters carry it out.

A plan names complete sets of devices and may be applied twice without harm. Its actions are in an order in which they
can be carried out one by one: what gives devices back comes before what takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gyrostat.core.devices import Devices
from gyrostat.core.request import JobId


@dataclass(frozen=True, slots=True)
class Start:
    """Let a waiting job run on these devices."""

    job: JobId
    devices: Devices
    reason: str
    borrowed: Devices = ()
    """Those of `devices` that belong to others and may be taken back."""
    shares_with: JobId | None = None
    """The job that has these devices too. When that ends or leaves them, this one has them for itself."""


@dataclass(frozen=True, slots=True)
class Resize:
    """Let a running job go on with these devices: more, fewer, or others (a migration)."""

    job: JobId
    before: Devices
    devices: Devices
    reason: str
    borrowed: Devices = ()

    @property
    def shrinks(self) -> bool:
        """It takes nothing new."""
        return set(self.devices) <= set(self.before)

    @property
    def migrates(self) -> bool:
        return len(self.devices) == len(self.before) and self.devices != self.before


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take all devices from a job. It keeps its state and waits."""

    job: JobId
    before: Devices
    reason: str


Action: TypeAlias = Start | Resize | Preempt


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one tick decided."""

    now: float
    actions: tuple[Action, ...] = ()
    wake_at: float | None = None
    """Decide again at this time even if nothing happens until then."""
