"""A worker's part in changing the generation: prepare while training goes on, switch at the fence.

The job's coordinator says which generation comes next, and this worker connects to its members in a thread of its own,
while the script trains. When all are connected, the coordinator sets the fence. From then on every worker acknowledges it in
its reductions, and the first one in which all have makes it hold: the generation begins at the boundary that follows, or as
many steps later as somebody needs to hand over data, and nothing can cancel it any more. All workers see the same
acknowledgements, so all decide alike. With `--schedule` the boundary is known from the start, and all wait there instead.

Newcomers wait in `Job`'s start, with everything built. One of the old members, the donor, lets them follow what it does
(catchup.py), and they count as connected when they have caught up. At the fence the contexts of all virtual workers are
exchanged among the old members, the donor tells newcomers what they do not hold yet, and they go on from the boundary as a
resumed job does. Who is not in the new generation leaves the script there.

A death is no planned change: the coordinator says at once who is left (`recover`). The generation in force ends there and then,
for whoever waits in it looks at the floor, and whatever was being prepared is given up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from gyrostat.core.errors import PeerLost
from gyrostat.core.job import NextGeneration
from gyrostat.engine.reconfigure.catch_up import StateSender
from gyrostat.engine.reconfigure.state_wire import StateWire
from gyrostat.engine.training.runner import Fence
from gyrostat.engine.transport.group import WorkerGroup
from gyrostat.engine.transport.pending import GenerationFloor


@dataclass
class PreparedGeneration:
    """A generation to which this worker is connected."""

    plan: NextGeneration
    group: WorkerGroup | None
    """None on a worker that leaves."""
    wire: StateWire | None
    """On the donor and on newcomers."""
    stream: StateSender | None = None
    """On the donor, since the first boundary after the wire was there."""

    def drop(self) -> None:
        """It will not be."""
        if self.group is not None:
            self.group.close()
        if self.stream is not None:
            self.stream.close()
        elif self.wire is not None:
            self.wire.close()


class Membership:
    """Which generation this worker is in, and which one comes next.

    `prepare`, `set_fence` and `cancel` are called by the thread that hears the coordinator, everything else by the script's.
    """

    def __init__(
        self,
        member: int,
        members: tuple[int, ...],
        *,
        connect: Callable[[NextGeneration], PreparedGeneration],
        tell_prepared: Callable[[int], None],
        tell_lost: Callable[[int, str], None] = lambda generation, why: None,
        floor: GenerationFloor | None = None,
    ) -> None:
        self._member, self._members = member, members
        self._connect, self._tell_prepared = connect, tell_prepared
        self._floor, self._tell_lost = floor or GenerationFloor(), tell_lost
        self._changed = threading.Condition()
        self._rescue_plan: NextGeneration | None = None
        self._rescue: PreparedGeneration | None = None
        self._hopeless = False
        self._plan: NextGeneration | None = None
        self._prepared: PreparedGeneration | None = None
        self._not_before: int | None = (
            None  # the fence is set: the earliest step at whose boundary it may hold
        )
        self._acknowledged = False  # in a reduction that has not settled
        self._cancelled = False  # meanwhile
        self._agreed: Fence | None = None
        self._told = False

    # What the coordinator says.

    def prepare(self, plan: NextGeneration) -> None:
        """Connect to the members of the next generation. Who is told twice does it once."""
        with self._changed:
            if plan.generation < self._floor.generation:
                return
            if self._plan is not None and self._plan.generation == plan.generation:
                return
            self._take()
            self._plan = plan
        threading.Thread(target=self._carry_out, args=(plan,), name="gyrostat-connect", daemon=True).start()

    def set_fence(self, generation: int, not_before: int) -> None:
        """All are connected: let it begin at the boundary of step `not_before`, or at the next one that all agree on."""
        with self._changed:
            if self._plan is not None and self._plan.generation == generation:
                self._not_before = not_before
                self._changed.notify_all()

    def cancel(self, generation: int) -> None:
        """The generation will not be: somebody who was to join has gone."""
        with self._changed:
            if self._plan is None or self._plan.generation != generation or self._agreed is not None:
                return
            if (
                self._acknowledged
            ):  # the others may have heard that: whether it holds is known when the pass has settled
                self._cancelled = True
                return
            abandoned = self._take()
        if abandoned is not None:
            abandoned.drop()

    def recover(self, plan: NextGeneration) -> None:
        """Somebody is lost: go on with these, at once. Who is told twice does it once."""
        with self._changed:
            if plan.generation <= self._floor.generation:
                return
            self._floor.generation = plan.generation
            self._rescue_plan, self._rescue = plan, None
            abandoned = self._take()
            self._changed.notify_all()
        if abandoned is not None:
            abandoned.drop()
        threading.Thread(target=self._reach, args=(plan,), name="gyrostat-rescue", daemon=True).start()

    def _reach(self, plan: NextGeneration) -> None:
        try:
            prepared = self._connect(plan)
        except PeerLost as lost:
            self._tell_lost(plan.generation, str(lost))
            return
        with self._changed:
            if self._rescue_plan is plan:
                self._rescue = prepared
                self._changed.notify_all()
                return
        prepared.drop()

    def abandon(self) -> None:
        """The job ends: nobody comes to the rescue of who has lost another."""
        with self._changed:
            self._hopeless = True
            self._changed.notify_all()

    def wait_for_rescue(self, generation: int, lost: PeerLost) -> PreparedGeneration:
        """Until this worker is connected to those that are left, in a generation after this one."""

        def there() -> bool:
            return self._hopeless or (self._rescue is not None and self._rescue.plan.generation > generation)

        with self._changed:
            self._changed.wait_for(there)
            if self._hopeless or self._rescue is None:
                raise lost
            return self._rescue

    @property
    def superseded(self) -> int:
        """Generations before this one have ended."""
        return self._floor.generation

    def _carry_out(self, plan: NextGeneration) -> None:
        try:
            prepared = self._connect(plan)
        except PeerLost:
            return  # somebody went away meanwhile: the coordinator hears of it, and cancels
        with self._changed:
            wanted = self._plan is plan
            if wanted:
                self._prepared = prepared
                self._changed.notify_all()
        if not wanted:
            prepared.drop()
        elif self._member not in plan.newcomers:  # those say so when they have caught up
            self._tell_prepared(plan.generation)

    # What the script's thread asks.

    def acknowledges(self, step: int, lead: int) -> Fence | None:
        """The generation that may begin when step `step` (counted from 0) is complete; said in its reduction.

        Unless it is scheduled for that boundary, `lead` steps later.
        """
        with self._changed:
            if self._plan is None or self._not_before is None or step + 1 < self._not_before:
                return None
            self._acknowledged = True
            return Fence(self._plan.generation, step + 1 + (0 if self._not_before else lead))

    def settled(self, agreed: Fence | None) -> None:
        """All have said what they acknowledge. From then on a fence that holds does so whatever happens."""
        with self._changed:
            self._acknowledged = False
            is_ours = (
                self._plan is not None and agreed is not None and self._plan.generation == agreed.generation
            )
            if is_ours and self._agreed is None:  # else it was called off by a death
                self._agreed = agreed
            abandoned = self._take() if self._cancelled and self._agreed is None else None
        if abandoned is not None:
            abandoned.drop()

    def change_to_come(self) -> tuple[NextGeneration, int | None] | None:
        """The generation to which this worker is connected, and the step at which it will begin, if all agree on that."""
        with self._changed:
            if self._prepared is None:
                return None
            return self._prepared.plan, None if self._agreed is None else self._agreed.step

    def at_boundary(self, step: int) -> PreparedGeneration | None:
        """The generation that begins at the boundary of this step."""
        with self._changed:
            return self._take() if self._agreed is not None and step >= self._agreed.step else None

    def connected(self) -> PreparedGeneration | None:
        """The generation to come, if this worker is connected to it."""
        with self._changed:
            return self._prepared

    def wait_here(
        self, generation: int, meanwhile: Callable[[PreparedGeneration], None]
    ) -> PreparedGeneration:
        """A boundary at which `generation` ends in any case: wait until it can. Raises `PeerLost` if it does at once.

        `meanwhile` is called when this worker is connected; again if the generation is given up and another prepared.
        """
        seen: PreparedGeneration | None = None
        while True:
            with self._changed:
                while self._prepared is None or (self._prepared is seen and self._not_before is None):
                    if self._floor.generation > generation:
                        raise PeerLost(f"generation {generation} has ended: another worker is lost")
                    self._changed.wait()
                if self._prepared is seen:
                    self._take()
                    return seen
                seen = self._prepared
            meanwhile(seen)

    def wait_until_invited(self) -> PreparedGeneration:
        """Newcomers: until connected to a generation."""
        with self._changed:
            self._changed.wait_for(lambda: self._prepared is not None)
            assert self._prepared is not None
            return self._prepared

    def caught_up(self, plan: NextGeneration) -> None:
        """Newcomers: all that the donor has told so far is replayed."""
        with self._changed:
            wanted = self._plan is plan and not self._told
            self._told = self._told or wanted
        if wanted:
            self._tell_prepared(plan.generation)

    def moved(self, plan: NextGeneration) -> None:
        """The generation has begun, with this worker."""
        with self._changed:
            self._members = plan.members
            if self._plan is plan:
                self._take()

    def worker_in(self, plan: NextGeneration) -> int | None:
        """Which worker of that generation this process will be."""
        return plan.worker_of(self._member)

    def is_leaving(self, plan: NextGeneration, *, worker: int) -> bool:
        """Whether who is worker `worker` now is not in that generation."""
        return self._members[worker] not in plan.members

    def _take(self) -> PreparedGeneration | None:
        prepared, self._plan, self._prepared, self._not_before = self._prepared, None, None, None
        self._agreed, self._acknowledged, self._cancelled = None, False, False
        return prepared
