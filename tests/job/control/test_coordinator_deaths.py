"""A member dies: those that are left are informed at once, whatever was being done, and another one takes its place."""

from __future__ import annotations

import msgspec
import pytest

from gyrostat.core.job import NextGeneration
from gyrostat.core.phase import ReconfigurationPhase
from gyrostat.core.placement import Placement
from gyrostat.job.control.coordinator import Coordinator
from gyrostat.job.control.coordinator_record import CoordinatorOptions, CoordinatorRecord
from gyrostat.job.control.generations import Generations
from gyrostat.job.control.instructions import (
    EndNewcomer,
    GiveUp,
    Instruction,
    Reconfiguration,
    ReconfigurationDone,
    StartNewcomer,
    SurvivorsGoOn,
    TellMember,
)
from gyrostat.job.processes.protocol import BeginRecovery, Prepare

ALIKE = {"seed": "7"}


def training(
    workers: int = 3,
    *,
    recovers: bool = True,
    min_workers: int = 1,
    schedule: list[Reconfiguration] | None = None,
) -> Coordinator:
    generations = Generations(6, tuple(range(workers)), store=lambda generation: f"store-{generation}")
    options = CoordinatorOptions(recovers=recovers, min_workers=min_workers)
    job = Coordinator(generations, schedule or [], options)
    job.started(ALIKE, 0, 6, 0.0)
    return job


def recovery(generation: int, *members: int, waits: bool = False) -> list[Instruction]:
    plan = NextGeneration(
        generation=generation,
        placement=Placement.even(6, len(members)),
        members=members,
        newcomers=(),
        donor=members[0],
        store=f"store-{generation}",
        is_recovery=True,
        waits=waits,
    )
    return [TellMember(member, BeginRecovery(plan)) for member in members]


def all_recovered(job: Coordinator, generation: int, *members: int) -> list[Instruction]:
    instructions: list[Instruction] = []
    placement = Placement.even(6, len(members))
    for member in members:
        assert instructions == []
        instructions = job.recovered(member, generation, placement, 1, 0.1 * member, 5.0)
    return instructions


def test_survivors_recover_and_then_another_worker_is_started() -> None:
    job = training()
    assert job.begin_recovery((1,), "worker 1 was killed", 4.0) == recovery(2, 0, 2)
    assert (job.busy() or "").startswith("busy: a worker was lost")
    assert all_recovered(job, 2, 0, 2) == [
        SurvivorsGoOn((1,), "worker 1 was killed", 0, 3, 2, 2, 0.2),
        StartNewcomer(3),
    ]


def test_another_one_dies_meanwhile() -> None:
    job = training()
    job.begin_recovery((1,), "worker 1 was killed", 4.0)
    job.recovered(0, 2, Placement.even(6, 2), 0, 0.0, 4.1)
    assert job.begin_recovery((2,), "worker 2 was killed", 4.2) == recovery(3, 0)
    assert job.recovered(2, 2, Placement.even(6, 2), 0, 0.0, 4.3) == []  # too late
    instructions = all_recovered(job, 3, 0)
    assert instructions == [
        SurvivorsGoOn((1, 2), "worker 1 was killed", 0, 3, 1, 1, 0.0),
        StartNewcomer(3),
        StartNewcomer(4),
    ]


def test_the_one_in_its_place_was_still_to_come_when_another_died() -> None:
    job = training()
    job.begin_recovery((1,), "worker 1 was killed", 4.0)
    assert StartNewcomer(3) in all_recovered(job, 2, 0, 2)
    assert job.begin_recovery((2,), "worker 2 was killed", 4.2) == [
        EndNewcomer(3, "worker 2 was killed"),
        *recovery(3, 0),
    ]
    assert [one for one in all_recovered(job, 3, 0) if isinstance(one, StartNewcomer)] == [
        StartNewcomer(4),
        StartNewcomer(5),
    ]


def test_nobody_is_left() -> None:
    assert training(1).begin_recovery((0,), "worker 0 was killed", 4.0) is None


def test_nobody_keeps_backups() -> None:
    job = training(recovers=False)
    assert job.begin_recovery((1,), "worker 1 was killed", 4.0) is None


def test_too_few_wait_for_others() -> None:
    job = training(min_workers=3)
    assert job.begin_recovery((1,), "worker 1 was killed", 4.0) == recovery(2, 0, 2, waits=True)
    survivors = all_recovered(job, 2, 0, 2)[0]
    assert isinstance(survivors, SurvivorsGoOn)
    assert survivors.waits


@pytest.mark.parametrize(
    "phase",
    [ReconfigurationPhase.STARTING_WORKERS, ReconfigurationPhase.CONNECTING, ReconfigurationPhase.FENCED],
)
def test_a_requested_change_begins_again(phase: ReconfigurationPhase) -> None:
    job = training()
    change = Reconfiguration(workers=4, reason="requested", request="r1")
    assert job.request_change(change, 1.0) == [StartNewcomer(3)]
    if phase is not ReconfigurationPhase.STARTING_WORKERS:
        job.ready(3, ALIKE, 1.1)
    if phase is ReconfigurationPhase.FENCED:
        for member in range(4):
            job.prepared(member, 2)
    assert job.generations.phase is phase
    generation = 2 if phase is ReconfigurationPhase.STARTING_WORKERS else 3
    assert job.begin_recovery((1,), "worker 1 was killed", 4.0) == [
        EndNewcomer(3, "worker 1 was killed"),
        *recovery(generation, 0, 2),
    ]
    instructions = all_recovered(job, generation, 0, 2)
    assert instructions[1:] == [
        StartNewcomer(4),
        StartNewcomer(5),
    ]  # from two to the four that were asked for


def test_a_generation_that_has_begun_for_some_has_begun() -> None:
    """The newcomer that has not said so yet never will."""
    job = training()
    job.request_change(Reconfiguration(workers=4, reason="requested", request="r1"), 1.0)
    job.ready(3, ALIKE, 1.1)
    for member in range(4):
        job.prepared(member, 2)
    job.switched(0, 2, 7, 0.01, 2.0)
    instructions = job.begin_recovery((1,), "worker 1 was killed", 2.1)
    assert instructions is not None
    assert isinstance(instructions[0], ReconfigurationDone)
    assert instructions[1:] == [EndNewcomer(3, "worker 1 was killed"), *recovery(3, 0, 2)]


def test_a_worker_that_was_asked_to_leave_is_not_replaced() -> None:
    job = training()
    assert isinstance(job.leaves(1, 1.0)[0], TellMember)
    job.begin_recovery((1,), "worker 1 took too long", 4.0)
    assert all_recovered(job, 3, 0, 2) == [SurvivorsGoOn((1,), "worker 1 took too long", 0, 3, 2, 2, 0.2)]


def test_connections_that_break_among_the_living() -> None:
    job = training()
    job.peer_lost(1, 4.0)
    assert job.tick(4.1) == []
    assert job.tick(4.6) == recovery(2, 0, 1, 2)
    assert all_recovered(job, 2, 0, 1, 2) == [
        SurvivorsGoOn((), "connections among workers broke", 0, 3, 3, 3, 0.2)
    ]


def test_mostly_the_death_is_heard_of_in_time() -> None:
    job = training()
    job.peer_lost(1, 4.0)
    job.begin_recovery((1,), "worker 1 was killed", 4.1)
    assert job.tick(9.0) == []


def test_the_next_leader_goes_on_with_it() -> None:
    job = training()
    job.begin_recovery((1,), "worker 1 was killed", 4.0)
    record = msgspec.json.decode(msgspec.json.encode(job.record()), type=CoordinatorRecord)
    options = CoordinatorOptions(recovers=True)
    restored = Coordinator.restore(record, lambda generation: f"store-{generation}", options)
    # The leader before may have taken the meeting place of generation 2 with it.
    assert restored.took_over(6.0) == recovery(3, 0, 2)
    assert StartNewcomer(3) in all_recovered(restored, 3, 0, 2)


def test_workers_wait_at_a_scheduled_step() -> None:
    """The change is prepared again at once, for nobody goes on without it."""
    job = training(schedule=[Reconfiguration(workers=2, reason="scheduled", at_step=1)])
    assert job.generations.phase is ReconfigurationPhase.CONNECTING
    job.begin_recovery((1,), "worker 1 was killed", 4.0)
    instructions = all_recovered(job, 3, 0, 2)
    assert [type(one.message) for one in instructions if isinstance(one, TellMember)] == [Prepare, Prepare]


@pytest.mark.parametrize("heard_first", ["the death", "that it left"])
def test_a_worker_that_has_left_at_the_fence_is_not_waited_for(heard_first: str) -> None:
    """All have passed the fence at which worker 2 leaves, but nobody has said so yet."""
    job = training()
    job.request_change(Reconfiguration(workers=2, reason="requested", request="r1"), 1.0)
    for member in range(3):
        job.prepared(member, 2)
    if heard_first == "the death":
        assert job.begin_recovery((1,), "worker 1 was killed", 2.0) == recovery(3, 0, 2)
        assert job.left(2, 2.1) == recovery(4, 0)
    else:
        assert job.left(2, 2.0) == []
        assert job.begin_recovery((1,), "worker 1 was killed", 2.1) == recovery(3, 0)


def test_the_exit_of_a_former_member_changes_nothing() -> None:
    assert training().begin_recovery((7,), "worker 7 was killed", 2.0) == []


def test_too_few_try_again_to_become_more() -> None:
    job = training(min_workers=3)
    job.begin_recovery((1,), "worker 1 was killed", 4.0)
    assert StartNewcomer(3) in all_recovered(job, 2, 0, 2)
    assert job.newcomer_gone(3, "was killed", 5.0) == [StartNewcomer(4)]
    assert job.newcomer_gone(4, "was killed", 6.0) == [StartNewcomer(5)]
    (last,) = job.newcomer_gone(5, "was killed", 7.0)
    assert isinstance(last, GiveUp)
