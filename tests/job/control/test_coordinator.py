"""The coordinator: exact instructions for every order of events that matters, and what no interleaving may do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.core.job import NextGeneration
from gyrostat.core.phase import ReconfigurationPhase
from gyrostat.core.placement import Placement
from gyrostat.job.control.coordinator import Coordinator
from gyrostat.job.control.coordinator_record import CoordinatorOptions, CoordinatorRecord
from gyrostat.job.control.generations import Generations
from gyrostat.job.control.instructions import (
    EndNewcomer,
    Instruction,
    ProfileDone,
    Reconfiguration,
    ReconfigurationDone,
    ReconfigurationRefused,
    StartNewcomer,
    StragglerNoticed,
    TellMember,
)
from gyrostat.job.control.profiling import ProfileRequest
from gyrostat.job.control.schedule import scheduled
from gyrostat.job.diagnostics.stragglers import Pace, Reaction, Straggler, StragglerPolicy
from gyrostat.job.processes.protocol import Cancel, Prepare, SetFence, StepReport, Terminate

ALIKE = {"threads": "1", "seed": "7"}


def coordinator(
    workers: int = 2,
    *,
    virtual_workers: int = 8,
    schedule: list[Reconfiguration] | None = None,
    options: CoordinatorOptions | None = None,
) -> Coordinator:
    generations = Generations(
        virtual_workers, tuple(range(workers)), store=lambda generation: f"store-{generation}"
    )
    return Coordinator(generations, schedule or [], options)


def training(
    workers: int = 2, virtual_workers: int = 8, options: CoordinatorOptions | None = None
) -> Coordinator:
    started = coordinator(workers, virtual_workers=virtual_workers, options=options)
    assert started.started(ALIKE, 0, virtual_workers, 0.0) == []
    return started


def phase_of(job: Coordinator) -> ReconfigurationPhase:
    return job.generations.phase


def change_to(workers: int, at_step: int | None = None) -> Reconfiguration:
    return Reconfiguration(workers=workers, at_step=at_step, reason="a test wants it", request="r1")


def plan_for(
    generation: int,
    members: tuple[int, ...],
    newcomers: tuple[int, ...],
    donor: int,
    at_step: int | None = None,
) -> NextGeneration:
    return NextGeneration(
        generation=generation,
        placement=Placement.even(8, len(members)),
        members=members,
        newcomers=newcomers,
        donor=donor,
        store=f"store-{generation}",
        at_step=at_step,
    )


def test_scale_out() -> None:
    job, change = training(), change_to(4)
    assert job.request_change(change, 1.0) == [StartNewcomer(2), StartNewcomer(3)]
    assert phase_of(job) is ReconfigurationPhase.STARTING_WORKERS
    assert job.ready(3, ALIKE, 2.0) == []
    plan = plan_for(2, (0, 1, 2, 3), (2, 3), donor=1)
    assert job.ready(2, ALIKE, 3.0) == [TellMember(member, Prepare(plan)) for member in (0, 1, 2, 3)]
    assert phase_of(job) is ReconfigurationPhase.CONNECTING
    for member in (0, 3, 1):
        assert job.prepared(member, 2) == []
    assert job.prepared(2, 2) == [TellMember(0, SetFence(2, 0)), TellMember(1, SetFence(2, 0))]
    assert phase_of(job) is ReconfigurationPhase.FENCED
    assert 2 in job.generations.newcomers
    assert job.switched(0, 2, 17, 0.25, 5.0) == []
    assert job.switched(3, 2, 17, 0.5, 5.5) == []
    assert job.switched(2, 2, 17, 0.1, 6.0, "differs") == [
        ReconfigurationDone(change, 17, 2, 4, 0.5, 5.0, (2, 3), "differs")
    ]
    assert job.switched(1, 2, 17, 0.20, 6.1) == []  # the others say so, too
    assert phase_of(job) is ReconfigurationPhase.STEADY
    assert 2 not in job.generations.newcomers
    assert job.members == (0, 1, 2, 3)


def test_a_newcomer_is_lost_or_the_job_ends_when_the_generation_has_begun_for_some() -> None:
    """Then the change was made, whoever has said so."""
    for what in ("gone", "over"):
        job, change = training(1), change_to(2)
        job.request_change(change, 1.0)
        job.ready(1, ALIKE, 2.0)
        job.prepared(0, 2)
        job.prepared(1, 2)
        assert job.switched(0, 2, 5, 0.1, 3.0) == []
        last = job.newcomer_gone(1, "died", 4.0) if what == "gone" else job.end()
        assert last == [ReconfigurationDone(change, 5, 1, 2, 0.1, 2.0, (1,))]
        assert job.members == (0, 1)


def test_scale_in_starts_nobody() -> None:
    job, change = training(4), change_to(2)
    plan = plan_for(2, (0, 1), (), donor=1)
    assert job.request_change(change, 1.0) == [TellMember(member, Prepare(plan)) for member in (0, 1, 2, 3)]
    for member in (0, 1, 2):
        assert job.prepared(member, 2) == []
    assert job.prepared(3, 2) == [TellMember(member, SetFence(2, 0)) for member in (0, 1, 2, 3)]
    assert job.switched(1, 2, 3, 0.0, 2.0) == [ReconfigurationDone(change, 3, 4, 2, 0.0, 1.0, ())]


def test_numbers_are_never_used_twice() -> None:
    job = training(1)
    job.request_change(change_to(2), 0.0)
    assert job.newcomer_gone(1, "died", 1.0) == [
        ReconfigurationRefused(change_to(2), "the new worker 1 died before it joined")
    ]
    assert job.request_change(change_to(2), 2.0) == [StartNewcomer(2)]
    job.ready(2, ALIKE, 3.0)
    assert job.newcomer_gone(2, "died", 4.0) == [
        TellMember(0, Cancel(2)),
        ReconfigurationRefused(change_to(2), "the new worker 2 died before it joined"),
    ]
    job.request_change(change_to(2), 5.0)
    assert job.ready(3, ALIKE, 6.0) == [
        TellMember(member, Prepare(plan_for(3, (0, 3), (3,), donor=0))) for member in (0, 3)
    ]
    assert job.prepared(0, 2) == []  # of the generation that was cancelled
    assert job.switched(0, 2, 9, 0.0, 7.0) == []


def test_one_of_two_newcomers_dies() -> None:
    job = training(2)
    job.request_change(change_to(4), 0.0)
    reason = "the new worker 3 was killed by signal 9 before it joined"
    assert job.newcomer_gone(3, "was killed by signal 9", 1.0) == [
        EndNewcomer(2, reason),
        ReconfigurationRefused(change_to(4), reason),
    ]
    assert phase_of(job) is ReconfigurationPhase.STEADY
    assert job.members == (0, 1)
    assert job.newcomer_gone(2, "was killed by signal 9", 1.1) == []  # we did that


def test_a_newcomer_that_does_not_fit() -> None:
    job = training(1)
    job.request_change(change_to(2), 0.0)
    reason = "the new worker 1 does not fit: its threads is '2', the job's '1'"
    assert job.ready(1, ALIKE | {"threads": "2"}, 1.0) == [
        EndNewcomer(1, reason),
        ReconfigurationRefused(change_to(2), reason),
    ]


@pytest.mark.parametrize("workers", [0, 9, -1])
def test_what_cannot_be(workers: int) -> None:
    (answer,) = training(2).request_change(change_to(workers), 0.0)
    assert isinstance(answer, ReconfigurationRefused)
    assert "ask for 1 to 8" in answer.reason


def test_one_change_at_a_time() -> None:
    early = coordinator(2)
    assert early.request_change(change_to(3), 0.0) == [
        ReconfigurationRefused(change_to(3), "the job has not begun to train yet; retry", retryable=True)
    ]
    job = training(2)
    job.request_change(change_to(3), 0.0)
    assert job.request_change(change_to(4), 0.0) == [
        ReconfigurationRefused(
            change_to(4), "busy with another change (to 3 workers, starting workers); retry", retryable=True
        )
    ]
    assert training(2).request_change(change_to(2), 0.0) == [
        ReconfigurationDone(change_to(2), 0, 2, 2, 0.0, 0.0, ())
    ]


def test_a_schedule_is_prepared_ahead_and_tried_again() -> None:
    plan = scheduled(1, [(10, 2), (20, 2), (30, 1)])
    assert [(change.at_step, change.workers) for change in plan] == [(10, 2), (30, 1)]
    job = coordinator(1, schedule=list(plan))
    assert job.started(ALIKE, 0, 8, 0.0) == [StartNewcomer(1)]
    assert job.newcomer_gone(1, "died", 1.0) == [StartNewcomer(2)]
    job.ready(2, ALIKE, 2.0)
    job.prepared(0, 2)
    assert job.prepared(2, 2) == [TellMember(0, SetFence(2, 10))]
    done, *then = job.switched(2, 2, 10, 0.0, 3.0)
    assert isinstance(done, ReconfigurationDone)
    then_plan = plan_for(3, (0,), (), donor=0, at_step=30)
    assert then == [TellMember(member, Prepare(then_plan)) for member in (0, 2)]


def test_a_schedule_that_cannot_be_kept() -> None:
    job = coordinator(1, schedule=scheduled(1, [(10, 2)]))
    job.started(ALIKE, 0, 8, 0.0)
    assert job.newcomer_gone(1, "died", 1.0) == [StartNewcomer(2)]
    assert job.newcomer_gone(2, "died", 2.0) == [StartNewcomer(3)]
    refused, released = job.newcomer_gone(3, "died", 3.0)
    reason = "the new worker 3 died before it joined; it is tried again later, and training goes on meanwhile"
    assert refused == ReconfigurationRefused(scheduled(1, [(10, 2)])[0], reason)
    assert released == TellMember(0, Prepare(plan_for(2, (0,), (), donor=0, at_step=10)))
    assert job.prepared(0, 2) == [TellMember(0, SetFence(2, 10))]
    job.switched(0, 2, 10, 0.0, 3.5)
    assert (job.deadline(), job.tick(3.9), job.tick(4.0)) == (4.0, [], [StartNewcomer(4)])
    assert job.deadline() is None
    (again,) = job.newcomer_gone(4, "died", 5.0)
    assert isinstance(again, ReconfigurationRefused)
    assert (job.deadline(), job.tick(7.0)) == (7.0, [StartNewcomer(5)])


def test_a_schedule_for_which_a_worker_does_not_fit_is_not_tried_again() -> None:
    job = coordinator(1, schedule=scheduled(1, [(10, 2)]))
    job.started(ALIKE, 0, 8, 0.0)
    _, refused, released = job.ready(1, {"threads": "2"}, 1.0)
    assert isinstance(refused, ReconfigurationRefused)
    assert released == TellMember(0, Prepare(plan_for(2, (0,), (), donor=0, at_step=10)))
    assert job.deadline() is None


def test_a_resumed_job_takes_up_its_schedule() -> None:
    """Of what lies before the checkpoint only the last counts, as soon as can be; what lies at it is waited for."""
    job = coordinator(1, schedule=scheduled(1, [(10, 2), (20, 4), (40, 1)]))
    assert job.started(ALIKE, 25, 8, 0.0) == [StartNewcomer(1), StartNewcomer(2), StartNewcomer(3)]
    job = coordinator(1, schedule=scheduled(1, [(10, 2), (20, 4), (40, 1)]))
    assert job.started(ALIKE, 20, 8, 0.0) == [StartNewcomer(1)]


def test_the_end_of_the_job_ends_newcomers() -> None:
    job = training(1)
    job.request_change(change_to(3), 0.0)
    assert job.end() == [
        EndNewcomer(1, "the job ended before it could join"),
        EndNewcomer(2, "the job ended before it could join"),
        ReconfigurationRefused(change_to(3), "the job ended before the change could be made"),
    ]
    assert job.request_change(change_to(2), 1.0) == [
        ReconfigurationRefused(change_to(2), "the job has not begun to train yet; retry", retryable=True)
    ]


def taken_over(job: Coordinator, now: float = 100.0) -> tuple[Coordinator, list[Instruction]]:
    """The next leader's coordinator, from what lies in the lease store, and what it does first."""
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(job.record()), type=CoordinatorRecord)
    successor = Coordinator.restore(kept, store=lambda generation: f"other-store-{generation}")
    return successor, successor.took_over(now)


def test_a_new_leader_of_a_steady_job_does_nothing() -> None:
    successor, first = taken_over(training(3))
    assert first == []
    assert (successor.members, successor.generations.current, phase_of(successor)) == (
        (0, 1, 2),
        1,
        ReconfigurationPhase.STEADY,
    )
    assert successor.started(ALIKE, 0, 8, 101.0) == []  # workers say it again
    assert successor.request_change(change_to(4), 102.0) == [StartNewcomer(3)]


def test_a_new_leader_calls_off_what_has_not_been_fenced() -> None:
    job, reason = training(2), "the job's leader has changed meanwhile; retry"
    job.request_change(change_to(4), 0.0)
    successor, first = taken_over(job)
    assert first == [
        EndNewcomer(2, reason),
        EndNewcomer(3, reason),
        ReconfigurationRefused(change_to(4), reason, retryable=True),
    ]
    assert successor.request_change(change_to(4), 101.0) == [StartNewcomer(4), StartNewcomer(5)]

    for member in (2, 3):
        job.ready(member, ALIKE, 1.0)
    job.prepared(0, 2)
    successor, first = taken_over(job)
    assert first == [
        EndNewcomer(2, reason),
        EndNewcomer(3, reason),
        TellMember(0, Cancel(2)),
        TellMember(1, Cancel(2)),
        ReconfigurationRefused(change_to(4), reason, retryable=True),
    ]
    assert successor.prepared(1, 2) == []
    assert (successor.generations.current, successor.members) == (2, (0, 1))


def test_a_new_leader_keeps_a_fence_that_may_hold_already() -> None:
    job, change = training(2), change_to(3)
    job.request_change(change, 0.0)
    job.ready(2, ALIKE, 1.0)
    for member in (0, 1, 2):
        job.prepared(member, 2)
    successor, first = taken_over(job)
    assert first == [TellMember(0, SetFence(2, 0)), TellMember(1, SetFence(2, 0))]
    assert successor.generations.change == change
    assert successor.switched(2, 2, 7, 0.5, 103.0) == [ReconfigurationDone(change, 7, 2, 3, 0.5, 3.0, (2,))]
    assert successor.members == (0, 1, 2)


def test_messages_that_may_be_lost_are_sent_again() -> None:
    job = training(2)
    assert job.generations.resend(0) == []
    job.request_change(change_to(3), 0.0)
    assert job.generations.resend(2) == []
    job.ready(2, ALIKE, 1.0)
    plan = plan_for(2, (0, 1, 2), (2,), donor=1)
    job.prepared(0, 2)
    assert (job.generations.resend(0), job.generations.resend(2)) == ([], [TellMember(2, Prepare(plan))])
    for member in (1, 2):
        job.prepared(member, 2)
    assert (job.generations.resend(0), job.generations.resend(2)) == ([TellMember(0, SetFence(2, 0))], [])


def test_a_new_leader_keeps_to_the_schedule() -> None:
    job = coordinator(1, schedule=scheduled(1, [(10, 2), (30, 1)]))
    job.started(ALIKE, 0, 8, 0.0)
    successor, first = taken_over(job)
    assert first == [EndNewcomer(1, "the job's leader has changed meanwhile; retry"), StartNewcomer(2)]
    successor.ready(2, ALIKE, 101.0)
    successor.prepared(0, 2)
    assert successor.prepared(2, 2) == [TellMember(0, SetFence(2, 10))]


def test_a_new_leader_of_a_job_that_has_not_begun_waits_for_it() -> None:
    successor, first = taken_over(coordinator(2, schedule=scheduled(2, [(3, 1)])))
    assert first == []
    (prepare, _) = successor.started(ALIKE, 0, 8, 101.0)
    assert isinstance(prepare, TellMember)


# Leaving by a signal.


def test_a_worker_that_is_sent_sigterm_leaves_at_the_next_boundary() -> None:
    job = training(3)
    plan = plan_for(2, (0, 2), (), donor=2)
    assert job.leaves(1, 1.0) == [TellMember(member, Prepare(plan)) for member in (0, 1, 2)]
    assert job.leaves(1, 1.1) == []  # once is enough
    for member in (0, 1):
        assert job.prepared(member, 2) == []
    assert job.prepared(2, 2) == [TellMember(member, SetFence(2, 0)) for member in (0, 1, 2)]
    (done,) = job.switched(0, 2, 7, 0.01, 2.0)
    assert done == ReconfigurationDone(
        Reconfiguration(workers=2, reason="worker 1 asked to leave by SIGTERM", without=(1,)),
        7,
        3,
        2,
        0.01,
        1.0,
        (),
    )
    assert job.members == (0, 2)
    assert job.leaves(1, 3.0) == []  # it has gone


def test_workers_that_ask_to_leave_during_a_change_leave_together_after_it() -> None:
    job = training(4)
    job.leaves(3, 1.0)
    assert job.leaves(1, 1.1) == []
    assert job.leaves(2, 1.2) == []
    for member in range(4):
        job.prepared(member, 2)
    _, *then = job.switched(0, 2, 5, 0.0, 2.0)
    assert then == [TellMember(member, Prepare(plan_for(3, (0,), (), donor=0))) for member in (0, 1, 2)]


def test_leaving_waits_for_a_change_that_is_under_way() -> None:
    job = training(2)
    job.request_change(change_to(3), 0.0)
    assert job.leaves(0, 0.5) == []
    job.ready(2, ALIKE, 1.0)
    for member in range(3):
        job.prepared(member, 2)
    done, *then = job.switched(2, 2, 5, 0.0, 2.0)
    assert isinstance(done, ReconfigurationDone)
    assert then == [TellMember(member, Prepare(plan_for(3, (1, 2), (), donor=2))) for member in (0, 1, 2)]


def test_the_last_one_ends_the_job() -> None:
    assert training(1).leaves(0, 1.0) == [TellMember(0, Terminate())]
    job = training(2)
    job.leaves(0, 1.0)
    job.leaves(1, 1.0)
    for member in range(2):
        job.prepared(member, 2)
    _, *then = job.switched(0, 2, 5, 0.0, 2.0)
    assert then == [TellMember(1, Terminate())]


def test_before_there_are_boundaries_a_signal_is_what_it_always_is() -> None:
    assert coordinator(2).leaves(1, 0.0) == [TellMember(1, Terminate())]


def test_a_newcomer_that_is_sent_sigterm_does_not_join() -> None:
    job = training(1)
    job.request_change(change_to(2), 0.0)
    reason = "the new worker 1 was asked to leave before it joined"
    assert job.leaves(1, 1.0) == [
        EndNewcomer(1, "was asked to leave"),
        ReconfigurationRefused(change_to(2), reason),
    ]


def test_a_schedule_continues_after_a_worker_left() -> None:
    """Workers wait at its step, so there is a change there even if their number is right by then."""
    job = coordinator(3, schedule=scheduled(3, [(10, 4), (20, 3)]))
    assert job.started(ALIKE, 0, 8, 0.0) == [StartNewcomer(3)]
    assert job.leaves(1, 0.5) == []
    job.ready(3, ALIKE, 1.0)
    for member in range(4):
        job.prepared(member, 2)
    _, *then = job.switched(3, 2, 10, 0.0, 2.0)
    assert then == [
        TellMember(member, Prepare(plan_for(3, (0, 2, 3), (), donor=3))) for member in (0, 1, 2, 3)
    ]
    for member in range(4):
        job.prepared(member, 3)
    _, *then = job.switched(0, 3, 11, 0.0, 3.0)
    plan = plan_for(4, (0, 2, 3), (), donor=3, at_step=20)
    assert then == [TellMember(member, Prepare(plan)) for member in (0, 2, 3)]
    for member in (0, 2):
        job.prepared(member, 4)
    assert job.prepared(3, 4) == [TellMember(member, SetFence(4, 20)) for member in (0, 2, 3)]


# Profiles.


def run_steps(job: Coordinator, first: int, last: int, now: float = 0.0) -> list[Instruction]:
    return job.stepped([StepReport(n, 0, 1.0, 16, float(n), (0.5,)) for n in range(first, last + 1)], now)


def switch(job: Coordinator, generation: int, step: int, members: Sequence[int]) -> list[Instruction]:
    for member in members:
        job.prepared(member, generation)
    return job.switched(members[-1], generation, step, 0.0, 1.0)


def test_a_profile_begins_wide_and_comes_back() -> None:
    job, asks = training(2), ProfileRequest(smallest=1, largest=3, steps=2, request="p")
    assert job.request_profile(asks, 0.0) == [StartNewcomer(2)]
    job.ready(2, ALIKE, 1.0)
    (done,) = switch(job, 2, 5, (0, 1, 2))
    assert isinstance(done, ReconfigurationDone)
    assert done.change.request is None  # nobody is answered yet
    assert job.request_change(change_to(1), 2.0) == [
        ReconfigurationRefused(change_to(1), "busy with a profile; retry", retryable=True)
    ]
    assert run_steps(job, 6, 8) == []
    assert run_steps(job, 9, 9) == [
        TellMember(member, Prepare(plan_for(3, (0, 1), (), donor=1))) for member in (0, 1, 2)
    ]
    switch(job, 3, 12, (0, 1, 2))
    assert run_steps(job, 10, 16) == [
        TellMember(member, Prepare(plan_for(4, (0,), (), donor=0))) for member in (0, 1)
    ]
    switch(job, 4, 17, (0, 1))
    assert run_steps(job, 17, 21) == [StartNewcomer(3)]  # back to two
    job.ready(3, ALIKE, 1.0)
    done, profiled = switch(job, 5, 30, (0, 3))
    assert isinstance(profiled, ProfileDone)
    assert profiled.profile == asks
    assert [(row.workers, row.throughput, row.busy) for row in profiled.rows] == [
        (1, 16.0, 0.5),
        (2, 16.0, 0.5),
        (3, 16.0, 0.5),
    ]
    assert [row.efficiency for row in profiled.rows] == [1.0, 0.5, 1 / 3]
    assert job.request_change(change_to(2), 9.0) == [
        ReconfigurationDone(change_to(2), 30, 2, 2, 0.0, 0.0, ())
    ]


def test_a_profile_of_the_size_it_has_changes_nothing() -> None:
    job = training(2)
    assert job.request_profile(ProfileRequest(steps=2), 0.0) == []
    (profiled,) = run_steps(job, 1, 5)
    assert isinstance(profiled, ProfileDone)
    assert [row.workers for row in profiled.rows] == [2]
    assert phase_of(job) is ReconfigurationPhase.STEADY


@pytest.mark.parametrize(("smallest", "largest"), [(0, 2), (3, 9), (4, 3), (None, 1)])
def test_profiles_that_cannot_be(smallest: int | None, largest: int | None) -> None:
    asks = ProfileRequest(smallest=smallest, largest=largest, request="p")
    (answer,) = training(2).request_profile(asks, 0.0)
    assert isinstance(answer, ReconfigurationRefused)
    assert answer.change.request == "p"


def test_a_profile_ends_early_when_a_worker_leaves_or_dies() -> None:
    job = training(2)
    job.request_profile(ProfileRequest(request="p"), 0.0)
    refused, *then = job.leaves(1, 1.0)
    assert isinstance(refused, ReconfigurationRefused)
    assert refused.reason == (
        "the profile was broken off: worker 1 leaves the job; the job runs on 2 workers and had 2"
    )
    assert then == [TellMember(member, Prepare(plan_for(2, (0,), (), donor=0))) for member in (0, 1)]
    job = training(2)
    job.request_profile(ProfileRequest(largest=3, request="p"), 0.0)
    (refused,) = job.newcomer_gone(2, "died", 1.0)
    assert isinstance(refused, ReconfigurationRefused)
    assert refused.change.request == "p"
    job = training(2)
    job.request_profile(ProfileRequest(request="p"), 0.0)
    (refused,) = job.end()
    assert isinstance(refused, ReconfigurationRefused)


# Stragglers.


def slow_steps(
    job: Coordinator, first: int, count: int, busy: tuple[float, ...], now: float
) -> list[Instruction]:
    return job.stepped([StepReport(n, 0, 1.0, 16, float(n), busy) for n in range(first, first + count)], now)


def watchful(reaction: Reaction, workers: int = 2, pace: Pace | None = None) -> Coordinator:
    pace = Pace(StragglerPolicy(reaction=reaction)) if pace is None else pace
    job = coordinator(workers, options=CoordinatorOptions(pace=pace))
    job.started(ALIKE, 0, 8, 0.0)
    return job


def test_a_straggler_is_reported() -> None:
    (noticed,) = slow_steps(watchful(Reaction.REPORT, 4), 1, 10, (2.0, 2.0, 2.0, 3.0), 1.0)
    assert noticed == StragglerNoticed(Straggler(member=3, seconds=1.5, usual=1.0))


def test_a_worker_with_more_virtual_workers_is_no_straggler() -> None:
    job = coordinator(3, virtual_workers=8)  # 3, 3 and 2 virtual workers
    job.started(ALIKE, 0, 8, 0.0)
    assert slow_steps(job, 1, 20, (3.0, 3.0, 2.0), 1.0) == []


def test_virtual_workers_follow_speed_but_not_all_the_time() -> None:
    job = watchful(Reaction.REPLACE)
    noticed, *instructions = slow_steps(job, 1, 10, (4.0, 12.0), 100.0)
    assert isinstance(noticed, StragglerNoticed)
    assert [
        tell.message.plan.placement
        for tell in instructions
        if isinstance(tell, TellMember) and isinstance(tell.message, Prepare)
    ] == [Placement.from_counts([6, 2])] * 2
    for member in (0, 1):
        job.prepared(member, 2)
    (done,) = job.switched(0, 2, 12, 0.0, 101.0)
    assert isinstance(done, ReconfigurationDone)
    assert done.change.counts == (6, 2)
    # Now the other one is slow: nothing for a minute, then back.
    assert slow_steps(job, 13, 30, (18.0, 2.0), 130.0) == [
        StragglerNoticed(Straggler(member=0, seconds=3.0, usual=2.0))
    ]
    assert slow_steps(job, 43, 1, (18.0, 2.0), 161.0)[0] == TellMember(
        0,
        Prepare(
            NextGeneration(
                generation=3,
                placement=Placement.from_counts([2, 6]),
                members=(0, 1),
                newcomers=(),
                donor=1,
                store="store-3",
            )
        ),
    )


def test_steps_of_the_generation_before_say_nothing_of_this_one() -> None:
    pace = Pace(StragglerPolicy(reaction=Reaction.REPLACE))
    job = watchful(Reaction.REPLACE, pace=pace)
    slow_steps(job, 1, 10, (4.0, 12.0), 100.0)
    for member in (0, 1):
        job.prepared(member, 2)
    job.switched(0, 2, 15, 0.0, 101.0)
    assert slow_steps(job, 11, 5, (4.0, 12.0), 102.0) == []
    assert pace.recent()[1] == 3.0  # as measured before, per virtual worker


def test_a_straggler_is_removed() -> None:
    job = watchful(Reaction.REMOVE, 3)
    noticed, *instructions = slow_steps(job, 1, 10, (3.0, 4.5, 2.0), 100.0)
    assert isinstance(noticed, StragglerNoticed)
    assert instructions == [
        TellMember(member, Prepare(plan_for(2, (0, 2), (), donor=2))) for member in (0, 1, 2)
    ]


def test_a_removed_straggler_may_come_back() -> None:
    """Its place is tried again after ten minutes; if that is slow, too, after twenty more."""
    job = watchful(Reaction.REMOVE, 3)
    slow_steps(job, 1, 10, (3.0, 4.5, 2.0), 100.0)
    for member in (0, 1, 2):
        job.prepared(member, 2)
    job.switched(0, 2, 11, 0.0, 101.0)
    assert list(job.members) == [0, 2]
    assert slow_steps(job, 12, 10, (4.0, 4.0), 699.0) == []
    assert slow_steps(job, 22, 1, (4.0, 4.0), 700.0) == [StartNewcomer(3)]
    job.ready(3, ALIKE, 701.0)
    for member in (0, 2, 3):
        job.prepared(member, 3)
    job.switched(3, 3, 24, 0.0, 702.0)
    assert list(job.members) == [0, 2, 3]
    noticed, *_ = slow_steps(job, 25, 10, (3.0, 3.0, 3.0), 703.0)  # the third has two virtual workers
    assert isinstance(noticed, StragglerNoticed)
    assert slow_steps(job, 35, 1, (3.0, 3.0, 3.0), 759.0) == []  # not within a minute
    assert slow_steps(job, 36, 1, (3.0, 3.0, 3.0), 760.0) != []
    for member in (0, 2, 3):
        job.prepared(member, 4)
    job.switched(0, 4, 37, 0.0, 761.0)
    assert slow_steps(job, 38, 10, (4.0, 4.0), 760.0 + 1199.0) == []
    assert slow_steps(job, 48, 1, (4.0, 4.0), 760.0 + 1200.0) == [StartNewcomer(4)]


def test_a_job_that_has_lost_workers_wants_as_many_as_before() -> None:
    """Until others have come in their place; whoever is killed before that does not make it smaller."""
    job = training(4, options=CoordinatorOptions(recovers=True))
    assert job.target_workers == 4
    job.begin_recovery((1,), "worker 1 was killed", 1.0)
    job.begin_recovery((3,), "worker 3 was killed", 1.0)
    assert (list(job.members), job.target_workers) == ([0, 2], 4)
    placement = Placement.even(8, 2)
    for member in (0, 2):
        job.recovered(member, job.generations.current + 2, placement, 1, 0.1, 2.0)
    assert (list(job.members), job.target_workers) == ([0, 2], 4)
    assert job.begin_recovery((0, 2), "all were killed", 3.0) is None
    assert job.target_workers == 4


@dataclass
class World:
    """Plays everybody else: processes that start, connect, switch or die, in any order."""

    job: Coordinator
    starting: set[int] = field(default_factory=set)
    connecting: dict[int, int] = field(default_factory=dict)
    fenced: dict[int, set[int]] = field(default_factory=dict)
    unanswered: dict[str, str] = field(default_factory=dict)
    generations: list[int] = field(default_factory=lambda: [1])
    step: int = 0
    ended: bool = False

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartNewcomer(member=member):
                    self.starting.add(member)
                case EndNewcomer(member=member):
                    self.starting.discard(member)
                    self.connecting.pop(member, None)
                case TellMember(member=member, message=Prepare(plan=plan)):
                    self.starting.discard(member)
                    self.connecting[member] = plan.generation
                case TellMember(member=member, message=SetFence(generation=generation)):
                    self.fenced.setdefault(generation, set()).add(member)
                case TellMember(member=member, message=Cancel(generation=generation)):
                    self.connecting.pop(member, None)
                    self.fenced.pop(generation, None)
                case TellMember(message=Terminate()):
                    self.ended = True
                case ReconfigurationDone(change=change) | ReconfigurationRefused(change=change):
                    if change.request is not None:
                        del self.unanswered[change.request]  # raises if it is answered twice
                case ProfileDone(profile=answered):
                    assert answered.request is not None
                    del self.unanswered[answered.request]

    def ask(self, kind: str) -> str:
        self.step += 1
        name = f"{kind}-{self.step}"
        self.unanswered[name] = kind
        return name


@settings(deadline=None)
@given(st.data())
def test_no_interleaving_breaks_it(data: st.DataObject) -> None:
    """Every request is answered, once; a fence is set only when all are connected; generations only go up; numbers of members
    are never used twice; a death before the fence leaves the members as they were; who is to leave has left in the end; a new
    leader changes nothing of that.
    """
    world = World(training(3))
    job, time, leavers = world.job, 0.0, set[int]()
    for _ in range(data.draw(st.integers(1, 60))):
        time += 1.0
        deeds = ["ask", "leave", "profile", "step", "step"]
        deeds += ["ready"] * bool(world.starting) + ["die"] * bool(job.generations.newcomers)
        deeds += ["connect"] * bool(world.connecting) + ["switch"] * bool(world.fenced) + ["take over"]
        match data.draw(st.sampled_from(deeds)):
            case "ask":
                workers = data.draw(st.integers(0, 9))
                world.obey(
                    job.request_change(
                        Reconfiguration(workers=workers, reason="", request=world.ask("scale")), time
                    )
                )
            case "leave":
                leaver = data.draw(st.sampled_from(job.members))
                leavers.add(leaver)
                world.obey(job.leaves(leaver, time))
            case "profile":
                sizes = sorted(data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8))))
                wanted = ProfileRequest(
                    smallest=sizes[0], largest=sizes[1], steps=1, request=world.ask("profile")
                )
                world.obey(job.request_profile(wanted, time))
            case "step":
                world.step += 5
                world.obey(run_steps(job, world.step - 4, world.step, time))
            case "ready":
                world.obey(job.ready(data.draw(st.sampled_from(sorted(world.starting))), ALIKE, time))
            case "connect":
                member = data.draw(st.sampled_from(sorted(world.connecting)))
                world.obey(job.prepared(member, world.connecting.pop(member)))
            case "switch":
                generation = max(world.fenced)
                assert not world.connecting, "a fence was set before all were connected"
                assert world.fenced.pop(generation) == set(job.members)
                newcomers = list(job.generations.newcomers)
                said: list[int] = []
                for member in newcomers or [job.members[0]]:
                    if data.draw(st.booleans()) and said:
                        # A new leader hears again what the one before knew.
                        world.job, first = taken_over(job, time)
                        job = world.job
                        world.obey(first)
                        for other in said:
                            world.obey(job.switched(other, generation, world.step, 0.1, time))
                    world.obey(job.switched(member, generation, world.step, 0.1, time))
                    said.append(member)
                world.fenced.pop(generation, None)
                world.generations.append(job.generations.current)
            case "take over":
                fenced = job.generations.phase is ReconfigurationPhase.FENCED
                before = job.members
                world.job, first = taken_over(job, time)
                job = world.job
                world.obey(first)
                assert job.members == before
                assert not fenced or job.generations.phase is ReconfigurationPhase.FENCED
            case "die":
                before = job.members
                victim = data.draw(st.sampled_from(list(job.generations.newcomers)))
                world.starting.discard(victim)
                world.connecting.pop(victim, None)
                world.obey(job.newcomer_gone(victim, "died", time))
                assert job.members == before
        assert len(set(job.members)) == len(job.members)
        assert world.generations == sorted(set(world.generations))
        assert len(world.unanswered) <= 1
        if job.generations.phase is ReconfigurationPhase.STEADY:
            assert "scale" not in world.unanswered.values()
            assert world.ended or not leavers & set(job.members), (
                "somebody waits to leave, and nothing happens"
            )
        if world.ended:
            break
    world.obey(job.end())
    assert not world.unanswered
