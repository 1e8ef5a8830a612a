"""The port between the one scheduling loop and any cluster: the simulator's, this machine's, Kubernetes'.

    observe → tick → apply → wait

A snapshot is told as what has changed since the last one; the first one tells everything (jobs that already run are
`Submitted`, then `Bound`). So nobody ever copies the state of a cluster: `sched.books` keeps read-only views up to date
change by change, and a recording of the snapshots is enough to have `tick` decide again what it decided then
(`sched.recording`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from gyrostat.core.devices import Devices
from gyrostat.core.plan import Plan
from gyrostat.core.request import JobId, JobRequest


@dataclass(frozen=True, slots=True)
class Submitted:
    """A new job."""

    request: JobRequest


@dataclass(frozen=True, slots=True)
class Bound:
    """A job that this scheduler has not placed holds these devices: it ran before the scheduler was started."""

    job: JobId
    devices: Devices
    borrowed: Devices = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A job has ended, for better or worse, or was cancelled. It holds nothing any more."""

    job: JobId


@dataclass(frozen=True, slots=True)
class Stopped:
    """A job lost all its devices without being asked: it failed to start, or all its workers died. It waits again."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """From now on `rate` units of work per second, `done` so far."""

    job: JobId
    done: float
    rate: float


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node and all its devices are gone, with the workers on them."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeBack:
    node: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """So many devices of a type are now needed by others (a serving load), in total; 0 gives all back."""

    type: str
    devices: int


Change: TypeAlias = Submitted | Bound | Finished | Stopped | Progressed | NodeLost | NodeBack | Withdrawn


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the loop learns from one look at a cluster."""

    now: float
    changes: tuple[Change, ...] = ()
    """Since the last look, in order. Those of one instant come together, so that they share a tick."""
    closed: bool = False
    """Nothing will happen any more unless somebody acts."""


class Cluster(Protocol):
    """Where jobs run."""

    def observe(self) -> Snapshot:
        """What has changed since the last call."""

    def apply(self, plan: Plan) -> None:
        """Carry it out. Idempotent; what became of it comes back as changes."""

    def wait(self, until: float | None) -> None:
        """Return when something has changed, or at that time."""
