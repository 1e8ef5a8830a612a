"""The phases of a worker in changing its generation, from the coordinator's messages and the passes it settles."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import pytest

from gyrostat.core.errors import PeerLost
from gyrostat.core.job import NextGeneration
from gyrostat.core.placement import Placement
from gyrostat.engine.reconfigure.membership import Membership
from gyrostat.engine.reconfigure.phases import MembershipPhase, PreparedGeneration
from gyrostat.engine.training.reports import Fence

TIMEOUT_S = 120.0
STEADY, CONNECTING, PREPARED, FENCE_SET, ACKNOWLEDGED, CANCELLING, AGREED, SWITCHING, RECOVERING, LEFT = (
    MembershipPhase
)


def plan(
    generation: int, *, members: tuple[int, ...] = (0, 1), newcomers: tuple[int, ...] = ()
) -> NextGeneration:
    return NextGeneration(
        generation=generation,
        placement=Placement.even(2, len(members)),
        members=members,
        newcomers=newcomers,
        donor=0,
        store="",
    )


class Connections(PreparedGeneration):
    """Counts how often it was dropped."""

    drops = 0

    def drop(self) -> None:
        self.drops += 1


class World:
    """A membership whose connections succeed when the test says so."""

    def __init__(self, *, connects: bool = True, member: int = 0) -> None:
        self.connected: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.reported: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.prepared: dict[int, Connections] = {}
        self.gate = threading.Event()
        self.fails = False
        if connects:
            self.gate.set()
        self.membership = Membership(
            member,
            (0, 1),
            connect=self._connect,
            report_prepared=self.reported.put,
            report_lost=lambda generation, why: self.lost.put((generation, why)),
        )

    def _connect(self, plan: NextGeneration) -> PreparedGeneration:
        assert self.gate.wait(TIMEOUT_S)
        self.connected.put(plan.generation)
        if self.fails:
            raise PeerLost("gone")
        self.prepared[plan.generation] = Connections(plan, None, None)
        return self.prepared[plan.generation]

    def prepare(self, generation: int) -> NextGeneration:
        """Until this worker has reported that it is connected."""
        named = plan(generation)
        self.membership.prepare(named)
        assert self.reported.get(timeout=TIMEOUT_S) == generation
        return named

    @property
    def phase(self) -> MembershipPhase:
        return self.membership.phase


def in_thread(do: Callable[[], object]) -> queue.SimpleQueue[object]:
    """The result of `do`, or what it raised."""
    result: queue.SimpleQueue[object] = queue.SimpleQueue()

    def run() -> None:
        try:
            result.put(do())
        except PeerLost as lost:
            result.put(lost)

    threading.Thread(target=run, daemon=True).start()
    return result


def test_messages_are_idempotent() -> None:
    """A leader that took over, or an agent that was away, sends a message again."""
    world = World()
    world.prepare(2)
    world.membership.prepare(plan(2))
    world.membership.set_fence(2, 5)
    world.membership.set_fence(2, 5)
    world.membership.cancel(2)
    world.membership.cancel(2)
    world.prepare(3)
    assert [world.connected.get(timeout=TIMEOUT_S) for _ in range(2)] == [2, 3]
    assert world.connected.empty()


def test_a_planned_change_passes_through_its_phases() -> None:
    world = World(connects=False)
    membership = world.membership
    phases = [world.phase]
    named = plan(2)
    membership.prepare(named)
    phases.append(world.phase)
    assert membership.prepared_change() is None
    world.gate.set()
    assert world.reported.get(timeout=TIMEOUT_S) == 2
    phases.append(world.phase)
    assert membership.prepared_change() == (named, None)
    assert membership.acknowledge(7, lead=2) is None
    membership.set_fence(2, 0)
    phases.append(world.phase)
    assert membership.acknowledge(7, lead=2) == Fence(2, 10)
    phases.append(world.phase)
    membership.settled(None)  # another worker did not know of the fence
    phases.append(world.phase)
    assert membership.acknowledge(8, lead=2) == Fence(2, 11)
    membership.settled(Fence(2, 12))
    phases.append(world.phase)
    membership.cancel(2)  # too late
    assert membership.prepared_change() == (named, 12)
    assert membership.at_boundary(11) is None
    assert membership.at_boundary(12) is world.prepared[2]
    phases.append(world.phase)
    membership.moved(named)
    phases.append(world.phase)
    assert phases == [
        STEADY,
        CONNECTING,
        PREPARED,
        FENCE_SET,
        ACKNOWLEDGED,
        FENCE_SET,
        AGREED,
        SWITCHING,
        STEADY,
    ]


def test_a_scheduled_fence_is_acknowledged_from_its_step_on_and_not_moved() -> None:
    world = World()
    world.prepare(2)
    world.membership.set_fence(2, 5)
    assert world.membership.acknowledge(3, lead=2) is None
    assert world.membership.acknowledge(4, lead=2) == Fence(2, 5)


@pytest.mark.parametrize("agreed", [True, False])
def test_what_is_cancelled_after_an_acknowledgement_is_decided_by_the_pass(agreed: bool) -> None:
    world = World()
    world.prepare(2)
    world.membership.set_fence(2, 0)
    world.membership.acknowledge(0, lead=0)
    world.membership.cancel(2)
    assert world.phase is CANCELLING
    world.membership.settled(Fence(2, 1) if agreed else None)
    assert world.phase is (AGREED if agreed else STEADY)
    assert world.prepared[2].drops == (not agreed)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_cancelled_change_is_dropped(fenced: bool) -> None:
    world = World()
    world.prepare(2)
    if fenced:
        world.membership.set_fence(2, 0)
    world.membership.cancel(3)  # another one
    assert world.prepared[2].drops == 0
    world.membership.cancel(2)
    assert world.prepared[2].drops == 1
    assert world.phase is STEADY
    assert world.membership.acknowledge(0, lead=0) is None


def test_connections_of_a_change_that_was_cancelled_meanwhile_are_dropped() -> None:
    world = World(connects=False)
    world.membership.prepare(plan(2))
    world.membership.cancel(2)
    world.membership.prepare(plan(3))
    world.gate.set()
    assert world.reported.get(timeout=TIMEOUT_S) == 3
    assert {world.connected.get(timeout=TIMEOUT_S) for _ in range(2)} == {2, 3}
    assert world.phase is PREPARED
    assert world.membership.connected() is world.prepared[3]


def test_a_fence_that_comes_before_the_connection_counts() -> None:
    world = World(connects=False)
    world.membership.prepare(plan(2))
    world.membership.set_fence(2, 0)
    assert world.phase is CONNECTING
    world.gate.set()
    assert world.reported.get(timeout=TIMEOUT_S) == 2
    assert world.phase is FENCE_SET


def test_a_worker_waits_at_a_scheduled_boundary_until_the_fence_is_set() -> None:
    world = World()
    seen: queue.SimpleQueue[PreparedGeneration] = queue.SimpleQueue()
    waiting = in_thread(lambda: world.membership.wait_at_boundary(1, seen.put))
    world.prepare(2)
    assert seen.get(timeout=TIMEOUT_S) is world.prepared[2]
    world.membership.cancel(2)
    world.prepare(3)
    assert seen.get(timeout=TIMEOUT_S) is world.prepared[3]
    world.membership.set_fence(3, 4)
    assert waiting.get(timeout=TIMEOUT_S) is world.prepared[3]
    assert world.phase is SWITCHING


def test_a_death_ends_the_generation_and_drops_the_change() -> None:
    world = World()
    world.prepare(2)
    waiting = in_thread(lambda: world.membership.wait_at_boundary(1, lambda prepared: None))
    survivors = plan(3, members=(0,))
    world.membership.recover(survivors)
    assert isinstance(waiting.get(timeout=TIMEOUT_S), PeerLost)
    assert world.phase is RECOVERING
    assert world.prepared[2].drops == 1
    lost = PeerLost("worker 1")
    found = world.membership.wait_for_survivors(1, lost)
    assert found is world.prepared[3]
    world.membership.recover(survivors)  # again
    world.membership.prepare(plan(2))  # of before the death
    world.membership.moved(survivors)
    assert world.phase is STEADY
    assert not world.membership.is_leaving(plan(4, members=(0,)), worker=0)


def test_a_second_death_supersedes_the_recovery_from_the_first() -> None:
    world = World()
    first, second = plan(2, members=(0, 2)), plan(3, members=(0,))
    world.membership.recover(first)
    assert world.membership.wait_for_survivors(1, PeerLost("")).plan is first
    world.membership.recover(second)
    world.membership.moved(first)
    assert world.phase is RECOVERING
    assert world.membership.wait_for_survivors(2, PeerLost("")).plan is second
    world.membership.moved(second)
    assert world.phase is STEADY


def test_a_survivor_that_cannot_connect_reports_it_and_waits() -> None:
    world = World()
    world.fails = True
    world.membership.recover(plan(2))
    assert world.lost.get(timeout=TIMEOUT_S) == (2, "gone")
    assert world.phase is RECOVERING
    lost = PeerLost("worker 1")
    waiting = in_thread(lambda: world.membership.wait_for_survivors(1, lost))
    world.membership.abandon()
    assert waiting.get(timeout=TIMEOUT_S) is lost


def test_a_newcomer_reports_once_and_only_when_it_has_caught_up() -> None:
    world = World(member=1)
    named = plan(2, newcomers=(1,))
    invited = in_thread(world.membership.wait_until_connected)
    world.membership.prepare(named)
    assert invited.get(timeout=TIMEOUT_S) is world.prepared[2]
    assert world.reported.empty()
    world.membership.caught_up(named)
    world.membership.caught_up(named)
    assert world.reported.get(timeout=TIMEOUT_S) == 2
    assert world.reported.empty()
    assert world.membership.worker_in(named) == 1
    world.membership.moved(named)
    assert (world.phase, world.membership.connected()) == (STEADY, None)


def test_a_member_that_is_not_in_the_generation_leaves() -> None:
    world = World()
    named = world.prepare(2)
    world.membership.set_fence(2, 0)
    world.membership.acknowledge(0, lead=0)
    world.membership.settled(Fence(2, 1))
    assert world.membership.at_boundary(1) is not None
    assert world.membership.is_leaving(plan(2, members=(1,)), worker=0)
    world.membership.left()
    world.membership.prepare(plan(3))
    world.membership.recover(plan(4))
    assert world.phase is LEFT
    assert named.worker_of(0) == 0


def test_phases_that_matter_are_logged_with_their_generation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gyrostat.engine.reconfigure.membership")
    world = World()
    world.prepare(2)
    world.membership.set_fence(2, 0)
    world.membership.acknowledge(0, lead=0)
    world.membership.settled(Fence(2, 1))
    world.membership.recover(plan(3))
    logged = [(record.getMessage(), vars(record)["generation"]) for record in caplog.records]
    assert logged == [
        ("membership: connecting, was steady", 2),
        ("membership: agreed, was acknowledged", 2),
        ("membership: recovering, was agreed", 3),
    ]
