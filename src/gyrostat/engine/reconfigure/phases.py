"""The phases of a worker in changing its generation, and the data that belongs to them. `membership.py` changes them.

Phases, and the events that change them:

    STEADY        prepare                               → CONNECTING
    CONNECTING    connected                             → PREPARED     (FENCE_SET if the fence came first)
                  cancel                                → STEADY
    PREPARED      set_fence                             → FENCE_SET
                  cancel                                → STEADY
    FENCE_SET     acknowledge, in a pass report         → ACKNOWLEDGED
                  cancel                                → STEADY
                  wait_at_boundary, a scheduled one     → SWITCHING
    ACKNOWLEDGED  settled: all have acknowledged        → AGREED
                  settled: not all                      → FENCE_SET
                  cancel: others may know the report    → CANCELLING
    CANCELLING    settled: all have acknowledged        → AGREED
                  settled: not all                      → STEADY
    AGREED        at_boundary, wait_at_boundary         → SWITCHING    (cancel is ignored)
    SWITCHING     moved                                 → STEADY
                  left                                  → LEFT
    RECOVERING    moved, to the survivors' generation   → STEADY       (or the phase of a change named meanwhile)

    any phase     recover                               → RECOVERING
    any but RECOVERING and LEFT: prepare, of another generation → CONNECTING
    a newcomer, PREPARED or FENCE_SET: moved            → STEADY
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gyrostat.core.job import NextGeneration
from gyrostat.engine.reconfigure.catch_up import StateSender
from gyrostat.engine.reconfigure.state_wire import StateWire
from gyrostat.engine.training.reports import Fence
from gyrostat.engine.transport.group import WorkerGroup


class MembershipPhase(StrEnum):
    """Where this worker stands in changing the generation."""

    STEADY = "steady"
    """No change is known."""
    CONNECTING = "connecting"
    """A generation is named, and a thread connects to its members."""
    PREPARED = "prepared"
    """Connected; other members may not be."""
    FENCE_SET = "fence set"
    """All are connected: pass reports acknowledge the fence."""
    ACKNOWLEDGED = "acknowledged"
    """In the report of a pass that has not settled."""
    CANCELLING = "cancelling"
    """Acknowledged and then cancelled: the pass that has not settled decides."""
    AGREED = "agreed"
    """All have acknowledged: the fence holds."""
    SWITCHING = "switching"
    """At the fence."""
    RECOVERING = "recovering"
    """A member has died: the survivors go on in another generation."""
    LEFT = "left"
    """This worker is not in the generation that has begun."""


@dataclass
class PreparedGeneration:
    """A generation to which this worker is connected."""

    plan: NextGeneration
    group: WorkerGroup | None
    """None on a worker that leaves."""
    wire: StateWire | None
    """On the donor and on newcomers."""
    sender: StateSender | None = None
    """On the donor, from the first boundary after it was connected."""

    def attach(self, sender: StateSender) -> None:
        """The donor has begun to send its state."""
        self.sender = sender

    def drop(self) -> None:
        """The generation will not begin."""
        if self.group is not None:
            self.group.close()
        if self.sender is not None:
            self.sender.close()
        elif self.wire is not None:
            self.wire.close()


@dataclass
class PlannedChange:
    """The planned change that is being prepared."""

    plan: NextGeneration
    prepared: PreparedGeneration | None = None
    """From PREPARED on."""
    not_before: int | None = None
    """From FENCE_SET on: the earliest step at whose boundary the fence may hold; 0: as soon as all agree."""
    fence: Fence | None = None
    """From AGREED on."""
    caught_up: bool = False
    """A newcomer has reported that it is prepared."""


@dataclass
class SurvivorChange:
    """The generation of the survivors."""

    plan: NextGeneration
    prepared: PreparedGeneration | None = None
    """Once this worker is connected to them."""
