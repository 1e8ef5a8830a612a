"""A worker's part in changing the generation, as a state machine: prepare while training goes on, switch at the fence.

The job's coordinator names the next generation, and this worker connects to its members in a thread of its own while the script
trains. When all are connected, the coordinator sets the fence. From then on every worker acknowledges it in its pass reports,
and it holds from the first pass in which all do: the generation begins at the boundary that follows, or as many steps later as
some worker needs to hand over data, and cannot be cancelled any more. All workers see the same acknowledgements, so all make
the same decision. With `--schedule` the boundary is known from the start, and all wait there instead.

Newcomers wait in the first loop of their script, with everything built. One of the old members, the donor, sends them its state
(`catch_up.py`), and they report that they are prepared when they have caught up.

A death is no planned change: the coordinator names the survivors at once (`recover`). The generation in force ends immediately,
because a worker that waits in it checks the generation floor, and the change that was being prepared is dropped.

The phases and the events that change them are in `phases.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gyrostat.core.errors import PeerLost
from gyrostat.core.job import NextGeneration
from gyrostat.engine.reconfigure.phases import (
    MembershipPhase,
    PlannedChange,
    PreparedGeneration,
    SurvivorChange,
)
from gyrostat.engine.training.reports import Fence
from gyrostat.engine.transport.pending import GenerationFloor

logger = logging.getLogger(__name__)


class Membership:
    """Which generation this worker is in, and which one comes next.

    `prepare`, `set_fence`, `cancel`, `recover` and `abandon` are called by the thread that receives the coordinator's messages,
    everything else by the script's thread.
    """

    def __init__(
        self,
        member: int,
        members: tuple[int, ...],
        *,
        connect: Callable[[NextGeneration], PreparedGeneration],
        report_prepared: Callable[[int], None],
        report_lost: Callable[[int, str], None] = lambda generation, why: None,
        floor: GenerationFloor | None = None,
    ) -> None:
        """`connect` blocks until all members of a generation are connected; it is called in a thread of its own."""
        self._member, self._members = member, members
        self._connect, self._report_prepared, self._report_lost = connect, report_prepared, report_lost
        self._floor = floor or GenerationFloor()
        self._changed = threading.Condition()
        self._phase = MembershipPhase.STEADY
        self._change: PlannedChange | None = None
        self._recovery: SurvivorChange | None = None
        self._abandoned = False

    @property
    def phase(self) -> MembershipPhase:
        return self._phase

    def _enter(self, phase: MembershipPhase, generation: int) -> None:
        """The only place that changes the phase. `generation`: the one that the event is about."""
        if phase is not self._phase:
            logger.log(
                logging.INFO if phase in _ANNOUNCED else logging.DEBUG,
                "membership: %s, was %s",
                phase,
                self._phase,
                extra={"generation": generation},
            )
        self._phase = phase
        self._changed.notify_all()

    # Messages of the coordinator.

    def prepare(self, plan: NextGeneration) -> None:
        """Connect to the members of the next generation. Idempotent."""
        with self._changed:
            known = self._change is not None and self._change.plan.generation == plan.generation
            if known or plan.generation < self._floor.generation or self._phase is MembershipPhase.LEFT:
                return
            self._change = PlannedChange(plan)
            if self._phase is not MembershipPhase.RECOVERING:
                self._enter(MembershipPhase.CONNECTING, plan.generation)
        threading.Thread(
            target=self._connect_to_members, args=(plan,), name="gyrostat-connect", daemon=True
        ).start()

    def set_fence(self, generation: int, not_before: int) -> None:
        """All are connected: begin at the boundary of step `not_before`, or at the first that all agree on."""
        with self._changed:
            if self._change is not None and self._change.plan.generation == generation:
                self._change.not_before = not_before
                if self._phase is MembershipPhase.PREPARED:
                    self._enter(MembershipPhase.FENCE_SET, generation)
                self._changed.notify_all()

    def cancel(self, generation: int) -> None:
        """The generation will not begin: a member that was to join is gone."""
        with self._changed:
            if self._change is None or self._change.plan.generation != generation:
                return
            match self._phase:
                case MembershipPhase.AGREED | MembershipPhase.CANCELLING:
                    return
                case MembershipPhase.ACKNOWLEDGED:
                    self._enter(MembershipPhase.CANCELLING, generation)
                    return
            dropped = self._drop_change()
        if dropped is not None:
            dropped.drop()

    def recover(self, plan: NextGeneration) -> None:
        """A member has died: go on with these, at once. Idempotent."""
        with self._changed:
            if plan.generation <= self._floor.generation or self._phase is MembershipPhase.LEFT:
                return
            self._floor.generation = plan.generation
            self._recovery = SurvivorChange(plan)
            self._enter(MembershipPhase.RECOVERING, plan.generation)
            dropped = self._drop_change()
        if dropped is not None:
            dropped.drop()
        threading.Thread(
            target=self._connect_to_survivors, args=(plan,), name="gyrostat-recover", daemon=True
        ).start()

    def abandon(self) -> None:
        """The job ends: a worker that has lost another does not wait for the survivors any more."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    # Threads that connect.

    def _connect_to_members(self, plan: NextGeneration) -> None:
        try:
            prepared = self._connect(plan)
        except PeerLost as lost:  # a member is gone, or the rendezvous: the coordinator cancels the change
            self._report_lost(plan.generation, str(lost))
            return
        with self._changed:
            change = self._change
            wanted = change is not None and change.plan is plan
            if change is not None and wanted:
                change.prepared = prepared
                if self._phase is MembershipPhase.CONNECTING:
                    self._enter(self._phase_of_change(), plan.generation)
        if not wanted:
            prepared.drop()
        elif self._member not in plan.newcomers:  # those report it when they have caught up
            self._report_prepared(plan.generation)

    def _connect_to_survivors(self, plan: NextGeneration) -> None:
        try:
            prepared = self._connect(plan)
        except PeerLost as lost:
            self._report_lost(plan.generation, str(lost))
            return
        with self._changed:
            if self._recovery is not None and self._recovery.plan is plan:
                self._recovery.prepared = prepared
                self._changed.notify_all()
                return
        prepared.drop()

    # The script's thread, while it trains.

    def acknowledge(self, step: int, lead: int) -> Fence | None:
        """The fence to acknowledge in the report of a pass of step `step` (counted from 0).

        It is at the boundary after that step if it is scheduled there, otherwise `lead` steps later.
        """
        with self._changed:
            change = self._change
            if change is None or change.not_before is None or step + 1 < change.not_before:
                return None
            generation = change.plan.generation
            if self._phase is MembershipPhase.FENCE_SET:
                self._enter(MembershipPhase.ACKNOWLEDGED, generation)
            return Fence(generation, step + 1 + (0 if change.not_before else lead))

    def settled(self, agreed: Fence | None) -> None:
        """A pass has settled, with the fence that all workers have acknowledged in it. From then on it holds."""
        dropped = None
        with self._changed:
            change = self._change
            if change is None or self._phase not in _UNSETTLED:
                return
            generation = change.plan.generation
            if agreed is not None and agreed.generation == generation:
                change.fence = agreed
                self._enter(MembershipPhase.AGREED, generation)
            elif self._phase is MembershipPhase.CANCELLING:
                dropped = self._drop_change()
            else:
                self._enter(MembershipPhase.FENCE_SET, generation)
        if dropped is not None:
            dropped.drop()

    def prepared_change(self) -> tuple[NextGeneration, int | None] | None:
        """The generation to which this worker is connected, and the step at which it begins, if all have agreed."""
        with self._changed:
            if self._change is None or self._change.prepared is None:
                return None
            fence = self._change.fence
            return self._change.plan, None if fence is None else fence.step

    def connected(self) -> PreparedGeneration | None:
        """The next generation, if this worker is connected to it."""
        with self._changed:
            return None if self._change is None else self._change.prepared

    # The script's thread, at a boundary.

    def at_boundary(self, step: int) -> PreparedGeneration | None:
        """The generation that begins at the boundary of this step."""
        with self._changed:
            change = self._change
            if change is None or change.fence is None or step < change.fence.step:
                return None
            return self._begin_switch(change)

    def wait_at_boundary(
        self, generation: int, meanwhile: Callable[[PreparedGeneration], None]
    ) -> PreparedGeneration:
        """Wait at a boundary at which `generation` is scheduled to end. Raises `PeerLost` if a death ends it.

        `meanwhile` is called when this worker is connected; again if the change is cancelled and another prepared.
        """
        seen: PreparedGeneration | None = None
        while True:
            with self._changed:
                while (
                    (change := self._change) is None
                    or change.prepared is None
                    or (change.prepared is seen and change.not_before is None)
                ):
                    if self._floor.generation > generation:
                        raise PeerLost(f"generation {generation} has ended: another worker is lost")
                    self._changed.wait()
                if change.prepared is seen:
                    return self._begin_switch(change)
                seen = change.prepared
            meanwhile(seen)

    def moved(self, plan: NextGeneration) -> None:
        """The generation has begun, with this worker."""
        with self._changed:
            self._members = plan.members
            if self._change is not None and self._change.plan is plan:  # a newcomer's
                self._change = None
            superseded = self._phase is MembershipPhase.RECOVERING and (
                self._recovery is None or self._recovery.plan is not plan
            )
            if not superseded:
                self._enter(self._phase_of_change(), plan.generation)

    def left(self) -> None:
        """The generation has begun, without this worker."""
        with self._changed:
            self._enter(MembershipPhase.LEFT, self._floor.generation)

    # The script's thread, in a recovery.

    def wait_for_survivors(self, generation: int, lost: PeerLost) -> PreparedGeneration:
        """Until this worker is connected to the survivors, in a generation after `generation`.

        Raises `lost` if the job ends.
        """
        with self._changed:
            while not self._abandoned:
                prepared = None if self._recovery is None else self._recovery.prepared
                if prepared is not None and prepared.plan.generation > generation:
                    return prepared
                self._changed.wait()
            raise lost

    # Newcomers.

    def wait_until_connected(self) -> PreparedGeneration:
        """Until connected to a generation."""
        with self._changed:
            while self._change is None or self._change.prepared is None:
                self._changed.wait()
            return self._change.prepared

    def caught_up(self, plan: NextGeneration) -> None:
        """All that the donor has sent so far is replayed. Reported once."""
        with self._changed:
            change = self._change
            if change is None or change.plan is not plan or change.caught_up:
                return
            change.caught_up = True
        self._report_prepared(plan.generation)

    # Questions.

    def worker_in(self, plan: NextGeneration) -> int | None:
        """Which worker of that generation this process will be."""
        return plan.worker_of(self._member)

    def is_leaving(self, plan: NextGeneration, *, worker: int) -> bool:
        """Whether the member that is worker `worker` now is not in that generation."""
        return self._members[worker] not in plan.members

    # With the lock held.

    def _phase_of_change(self) -> MembershipPhase:
        """The phase of a change that has not been acknowledged."""
        if self._change is None:
            return MembershipPhase.STEADY
        if self._change.prepared is None:
            return MembershipPhase.CONNECTING
        fenced = self._change.not_before is not None
        return MembershipPhase.FENCE_SET if fenced else MembershipPhase.PREPARED

    def _begin_switch(self, change: PlannedChange) -> PreparedGeneration:
        assert change.prepared is not None
        self._change = None
        self._enter(MembershipPhase.SWITCHING, change.plan.generation)
        return change.prepared

    def _drop_change(self) -> PreparedGeneration | None:
        """The change will not take place. Returns the connections, to be closed without the lock."""
        change, self._change = self._change, None
        if change is None:
            return None
        if self._phase is not MembershipPhase.RECOVERING:
            self._enter(MembershipPhase.STEADY, change.plan.generation)
        return change.prepared


_UNSETTLED = (MembershipPhase.ACKNOWLEDGED, MembershipPhase.CANCELLING)
_ANNOUNCED = (
    MembershipPhase.CONNECTING,
    MembershipPhase.AGREED,
    MembershipPhase.RECOVERING,
    MembershipPhase.LEFT,
)
"""Logged as INFO; the others as DEBUG."""
