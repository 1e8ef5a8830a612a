"""What a worker does in its passes and at its boundaries when the generation changes: alone, without other processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gyrostat.core.errors import PeerLost
from gyrostat.core.job import NextGeneration
from gyrostat.core.placement import Placement
from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint.manager import Boundary, CheckpointManager
from gyrostat.engine.reconfigure.membership import Membership
from gyrostat.engine.reconfigure.phases import MembershipPhase, PreparedGeneration
from gyrostat.engine.reconfigure.transition import Left, Transition
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.supervisor import NullSupervisor
from gyrostat.engine.training.collectives import Collectives, NoRecovery
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.loop_length import LoopLength
from gyrostat.engine.training.plan import StepPlan
from gyrostat.engine.training.reports import Fence, PassOutcome, RequestBox
from gyrostat.engine.training.virtual_workers import make_virtual_workers
from gyrostat.engine.transport.group import WorkerGroup

TIMEOUT_S = 120.0


def group(generation: int) -> WorkerGroup:
    return WorkerGroup(rank=0, size=1, generation=generation, store=None, timeout_s=1.0)


class Supervisor(NullSupervisor):
    def __init__(self) -> None:
        self.switches: list[tuple[int, int, int]] = []

    def switched(
        self, generation: int, step: int, workers: int, paused: float, why_all: str | None = None
    ) -> None:
        self.switches.append((generation, step, workers))


class World:
    """A lone worker that is member 0. `stays`: it is in the next generation, too."""

    def __init__(self, *, stays: bool = True, holds: tuple[int, ...] = ()) -> None:
        self.supervisor, self.stays = Supervisor(), stays
        generation = CurrentGeneration(Placement.even(2, 1), group(1))
        self.workers = make_virtual_workers(generation, seed=1)
        self.model = nn.Linear(2, 2)
        self.workers.gradients.add("model", self.model, DdpOptions())
        self.workers.contexts.start()
        self.reported: list[int] = []
        self.membership = Membership(0, (0,), connect=self._connect, report_prepared=self.reported.append)
        self.recovered_from: list[PeerLost] = []
        self.after_recovery: Callable[[], None] = lambda: None
        collectives = Collectives(generation, self.workers.log, NoRecovery())
        checkpoints = CheckpointManager(
            None,
            self.workers,
            collectives,
            fingerprint={},
            seed=1,
            supervisor=self.supervisor,
            requests=RequestBox(),
        )
        self.transition = Transition(
            self.membership,
            self.workers,
            collectives,
            self,
            checkpoints,
            self.supervisor,
            length=LoopLength(generation, collectives),
            loaders={},
            holds=holds,
            seed=1,
        )

    available = True

    def recover(self, lost: PeerLost, plan: StepPlan | None) -> list[bytes] | None:
        """As `Recovery` does, where nobody else survives."""
        self.recovered_from.append(lost)
        survivors = self.membership.wait_for_survivors(self.generation, lost)
        assert survivors.group is not None
        self.membership.moved(survivors.plan)
        self.transition.recovered(False, None)
        self.workers.relocation.follow(survivors.plan.placement, survivors.group, in_pass=False)
        self.after_recovery()
        return None

    def _connect(self, plan: NextGeneration) -> PreparedGeneration:
        return PreparedGeneration(plan, group(plan.generation) if 0 in plan.members else None, None)

    def plan(self, generation: int, at_step: int | None = None) -> NextGeneration:
        return NextGeneration(
            generation=generation,
            at_step=at_step,
            placement=Placement.even(2, 1),
            members=(0,) if self.stays else (1,),
            newcomers=(),
            donor=0,
            store="",
        )

    def prepare(self, generation: int, at_step: int | None = None) -> None:
        """Until the fence is set."""
        self.membership.prepare(self.plan(generation, at_step))
        self.membership.set_fence(generation, at_step or 0)
        self.membership.wait_until_connected()

    def settle_pass(self, step: int) -> None:
        """A pass of step `step` in which all workers, which is this one, acknowledge what they know."""
        fence = self.membership.acknowledge(step, self.workers.relocation.fence_lead)
        self.transition.pass_done(PassOutcome(fence=fence), Progress(step=step))

    def boundary(self, step: int) -> None:
        self.transition.boundary(Boundary({"model": self.model}, {}, Progress(step=step), {}))

    @property
    def generation(self) -> int:
        return self.workers.generation.group.generation


def test_without_a_change_a_boundary_does_nothing() -> None:
    world = World()
    world.settle_pass(0)
    world.boundary(1)
    assert (world.generation, world.supervisor.switches) == (1, [])


def test_a_fence_that_all_acknowledged_is_passed_at_its_boundary() -> None:
    world = World()
    streams = {rank: context.rng for rank, context in world.workers.contexts.contexts.items()}
    world.prepare(2)
    world.boundary(3)  # not acknowledged in any pass yet
    assert world.generation == 1
    world.settle_pass(3)
    assert world.membership.prepared_change() == (world.plan(2), 4)
    world.boundary(4)
    assert (world.generation, world.supervisor.switches) == (2, [(2, 4, 1)])
    assert world.membership.phase is MembershipPhase.STEADY
    assert {rank: context.rng for rank, context in world.workers.contexts.contexts.items()} == streams


def test_reducers_of_the_next_generation_keep_their_order() -> None:
    world = World()
    before = world.workers.gradients.layouts()
    world.prepare(2)
    world.settle_pass(0)
    world.boundary(1)
    assert world.workers.gradients.layouts() == before


def test_a_member_that_is_not_in_it_leaves() -> None:
    world = World(stays=False)
    world.prepare(2)
    world.settle_pass(0)
    with pytest.raises(Left):
        world.boundary(1)
    assert world.membership.phase is MembershipPhase.LEFT
    assert world.supervisor.switches == []


def test_a_scheduled_boundary_is_waited_at_once() -> None:
    world = World(holds=(2,))
    world.prepare(2, at_step=2)
    world.boundary(1)
    assert world.generation == 1
    world.boundary(2)
    assert world.generation == 2
    world.boundary(2)  # of another loop that begins at the same step
    assert world.supervisor.switches == [(2, 2, 1)]


def test_a_death_while_it_waits_at_a_scheduled_boundary() -> None:
    """The survivors recover, and then wait for the change to be prepared again."""
    world = World(holds=(2,))
    world.membership.recover(world.plan(2))
    after: list[MembershipPhase] = []

    def prepare_again() -> None:
        after.append(world.membership.phase)
        world.prepare(3, at_step=2)

    world.after_recovery = prepare_again
    world.boundary(2)
    assert [str(lost) for lost in world.recovered_from] == ["generation 1 has ended: another worker is lost"]
    assert after == [MembershipPhase.STEADY]
    assert (world.generation, world.supervisor.switches) == (3, [(3, 2, 1)])


def test_another_generation_does_not_end_the_wait_for_the_scheduled_one() -> None:
    """One that was due before, and met the scheduled boundary."""
    world = World(holds=(2, 4))
    began: list[int] = []

    def switched(generation: int, step: int, workers: int, paused: float, why_all: str | None = None) -> None:
        began.append(generation)
        if generation == 2:
            world.prepare(3, at_step=2)

    world.supervisor.switched = switched  # type: ignore[method-assign]
    world.prepare(2)
    world.boundary(2)
    assert began == [2, 3]
    world.boundary(3)
    world.prepare(4, at_step=4)
    world.boundary(4)
    assert began == [2, 3, 4]


def test_survivors_that_are_too_few_wait_at_the_boundary_they_agreed_on() -> None:
    world = World()
    world.transition.recovered(False, 5)
    world.prepare(2)
    world.boundary(4)
    world.boundary(5)
    assert world.supervisor.switches == [(2, 5, 1)]


def test_a_fence_of_another_generation_is_not_ours() -> None:
    world = World()
    world.prepare(2)
    world.transition.pass_done(PassOutcome(fence=Fence(7, 1)), Progress())
    world.boundary(1)
    assert world.generation == 1


def test_gradients_and_contexts_survive_a_switch() -> None:
    world = World()
    context = world.workers.contexts.contexts[1]
    context.local["seen"] = torch.arange(3)
    world.prepare(2)
    world.settle_pass(0)
    world.boundary(1)
    assert world.workers.contexts.contexts[1] is context
