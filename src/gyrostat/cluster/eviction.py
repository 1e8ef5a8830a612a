"""How a job that has to leave devices is made to leave them in time. Pure: time is an argument.

Devices that the scheduler assigns to another job, a serving load or nobody are left at the job's next boundary, where nothing
is lost. But a boundary may be far away: a script that loads data before its first loop, a long step, an evaluation, a stopped
process. So every device has a deadline, the preemption grace of the cluster, after which it is taken:

1. If the job trains and keeps other devices, its workers on the devices that it has to leave are killed, and the others
   recover from peers: nothing is repeated but the pass that was running.
2. Otherwise, or if the job does not respond to that, its host is killed. The job returns to the queue, or restarts on the
   devices that it keeps, from its newest checkpoint; without one it begins again.

Neither changes a bit of its result. `local.driver` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from gyrostat.core.devices import DeviceId, Devices

GRACE_S = 30.0
"""The default preemption grace."""
RESPONSE_S = 5.0
"""How long a job may take to end workers on request, before its host is killed."""


class EvictionStep(Enum):
    WAIT = auto()
    """It may still reach a boundary."""
    END_WORKERS = auto()
    """Kill its workers on the devices that it has to leave; the others recover."""
    KILL_HOST = auto()


@dataclass(frozen=True)
class Eviction:
    """The next step, and why."""

    step: EvictionStep
    reason: str
    until: float | None
    """When the step after it is due; None: there is none."""


def next_eviction(
    *, now: float, deadline: float, grace: float, leaving: Devices, staying: Devices, trains: bool
) -> Eviction:
    """For a job that has to leave `leaving` by `deadline`, `grace` seconds after it was asked to, and keeps `staying`.

    `trains`: it has begun to train, so that its workers can recover from the loss of some.
    """
    late = f"it has not left devices {', '.join(map(str, leaving))} within {grace:g} s"
    if now < deadline:
        return Eviction(EvictionStep.WAIT, "it leaves at its next boundary", deadline)
    if staying and trains:
        if now < deadline + RESPONSE_S:
            reason = f"{late}: its workers there are killed, and the others go on"
            return Eviction(EvictionStep.END_WORKERS, reason, deadline + RESPONSE_S)
        late = f"{late}, and its host did not end its workers there"
    return Eviction(EvictionStep.KILL_HOST, f"{late}: it is killed", None)


class LeaveDeadlines:
    """By when a job has to leave which of its devices. A later command may bring a deadline forward, never put it off."""

    def __init__(self) -> None:
        self._by: dict[DeviceId, tuple[float, float]] = {}
        """Deadline and grace."""

    def update(self, leaving: Iterable[DeviceId], grace: float, now: float) -> None:
        """It has to leave exactly these, those that are new to it within `grace` seconds."""
        due = (now + grace, grace)
        self._by = {device: min(self._by.get(device, due), due) for device in leaving}

    def first(self) -> tuple[float, float] | None:
        """The first deadline, and its grace; None: it has to leave nothing."""
        return min(self._by.values(), default=None)
