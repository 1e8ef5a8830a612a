"""The port between the one scheduling loop and any cluster: the simulator's, this machine's, Kubernetes'.

    observe → tick → apply → wait

A snapshot is the list of changes since the last one; the first one has everything (jobs that already run are
`Submitted`, then `Bound`). So the state of a cluster is never copied: `sched.state` updates read-only views change by
change, and a recording of the snapshots is enough to run `tick` again with the same decisions (`sched.recording`).

File format: recordings contain the names of the changes' classes and fields. Do not rename them.
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
    """A job holds these devices that this scheduler has not placed: it was running when the scheduler started."""

    job: JobId
    devices: Devices
    borrowed: Devices = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A job has succeeded, failed or been cancelled. It holds no devices any more."""

    job: JobId


@dataclass(frozen=True, slots=True)
class Stopped:
    """A job lost all its devices without a preemption: it failed to start, or all its workers died. It waits again."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """A job reports its progress: `done` units of work so far, and `rate` units per second from now on."""

    job: JobId
    done: float
    rate: float


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node has failed: its devices are not available, and the workers on them have died."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeBack:
    """The devices of a node that failed are available again."""

    node: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A serving load takes this many devices of a type, in total; 0 returns all of them."""

    type: str
    devices: int


Change: TypeAlias = Submitted | Bound | Finished | Stopped | Progressed | NodeLost | NodeBack | Withdrawn


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The changes that one observation of a cluster found."""

    now: float
    changes: tuple[Change, ...] = ()
    """Since the last observation, in order. Changes of one instant are in one snapshot, so that they share a tick."""
    closed: bool = False
    """No further change will occur unless a plan is applied."""


class Cluster(Protocol):
    """Where jobs run."""

    def observe(self) -> Snapshot:
        """What has changed since the last call."""

    def apply(self, plan: Plan) -> None:
        """Carry out a plan. Idempotent; its outcome is reported as changes."""

    def wait(self, until: float | None) -> None:
        """Return when something has changed, or at that time, whichever comes first."""
