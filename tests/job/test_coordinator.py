"""The coordinator: exact instructions for every order of events that matters, and what no interleaving may do."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.job import NextGeneration
from gyrostat.core.placement import Placement
from gyrostat.job.coordinator import (
    Change,
    Coordinator,
    CoordinatorRecord,
    Done,
    End,
    GiveUp,
    Instruction,
    Phase,
    Refused,
    Start,
    Tell,
    changes,
)
from gyrostat.job.protocol import Cancel, Prepare, SetFence

ALIKE = {"threads": "1", "seed": "7"}


def coordinator(
    workers: int = 2, *, virtual_workers: int = 8, schedule: list[Change] | None = None
) -> Coordinator:
    return Coordinator(
        virtual_workers,
        tuple(range(workers)),
        store=lambda generation: f"store-{generation}",
        schedule=schedule or [],
    )


def training(workers: int = 2, virtual_workers: int = 8) -> Coordinator:
    started = coordinator(workers, virtual_workers=virtual_workers)
    assert started.started(ALIKE, 0, virtual_workers, 0.0) == []
    return started


def phase_of(job: Coordinator) -> Phase:
    return job.phase


def wish(workers: int, at_step: int | None = None) -> Change:
    return Change(workers=workers, at_step=at_step, reason="a test wants it", request="r1")


def plan_for(
    generation: int, members: tuple[int, ...], newcomers: tuple[int, ...], donor: int
) -> NextGeneration:
    return NextGeneration(
        generation=generation,
        placement=Placement.even(8, len(members)),
        members=members,
        newcomers=newcomers,
        donor=donor,
        store=f"store-{generation}",
    )


def test_scale_out() -> None:
    job, change = training(), wish(4)
    assert job.asked(change, 1.0) == [Start(2), Start(3)]
    assert phase_of(job) is Phase.STARTING
    assert job.ready(3, ALIKE, 2.0) == []
    plan = plan_for(2, (0, 1, 2, 3), (2, 3), donor=1)
    assert job.ready(2, ALIKE, 3.0) == [Tell(member, Prepare(plan)) for member in (0, 1, 2, 3)]
    assert phase_of(job) is Phase.CONNECTING
    for member in (0, 3, 1):
        assert job.prepared(member, 2) == []
    assert job.prepared(2, 2) == [Tell(0, SetFence(2, 0)), Tell(1, SetFence(2, 0))]
    assert phase_of(job) is Phase.FENCED
    assert job.is_newcomer(2)
    assert job.switched(0, 2, 17, 0.25, 5.0) == []
    assert job.switched(3, 2, 17, 0.5, 5.5) == []
    assert job.switched(2, 2, 17, 0.1, 6.0, "differs") == [
        Done(change, 17, 2, 4, 0.5, 5.0, (2, 3), "differs")
    ]
    assert job.switched(1, 2, 17, 0.20, 6.1) == []  # the others say so, too
    assert phase_of(job) is Phase.STEADY
    assert not job.is_newcomer(2)
    assert job.members == (0, 1, 2, 3)


def test_a_newcomer_is_lost_or_the_job_ends_when_the_generation_has_begun_for_some() -> None:
    """Then the change was made, whoever has said so."""
    for what in ("gone", "over"):
        job, change = training(1), wish(2)
        job.asked(change, 1.0)
        job.ready(1, ALIKE, 2.0)
        job.prepared(0, 2)
        job.prepared(1, 2)
        assert job.switched(0, 2, 5, 0.1, 3.0) == []
        last = job.gone(1, "died", 4.0) if what == "gone" else job.over()
        assert last == [Done(change, 5, 1, 2, 0.1, 2.0, (1,))]
        assert job.members == (0, 1)


def test_scale_in_starts_nobody() -> None:
    job, change = training(4), wish(2)
    plan = plan_for(2, (0, 1), (), donor=1)
    assert job.asked(change, 1.0) == [Tell(member, Prepare(plan)) for member in (0, 1, 2, 3)]
    for member in (0, 1, 2):
        assert job.prepared(member, 2) == []
    assert job.prepared(3, 2) == [Tell(member, SetFence(2, 0)) for member in (0, 1, 2, 3)]
    assert job.switched(1, 2, 3, 0.0, 2.0) == [Done(change, 3, 4, 2, 0.0, 1.0, ())]


def test_numbers_are_never_used_twice() -> None:
    job = training(1)
    job.asked(wish(2), 0.0)
    assert job.gone(1, "died", 1.0) == [Refused(wish(2), "the new worker 1 died before it joined")]
    assert job.asked(wish(2), 2.0) == [Start(2)]
    job.ready(2, ALIKE, 3.0)
    assert job.gone(2, "died", 4.0) == [
        Tell(0, Cancel(2)),
        Refused(wish(2), "the new worker 2 died before it joined"),
    ]
    job.asked(wish(2), 5.0)
    assert job.ready(3, ALIKE, 6.0) == [
        Tell(member, Prepare(plan_for(3, (0, 3), (3,), donor=0))) for member in (0, 3)
    ]
    assert job.prepared(0, 2) == []  # of the generation that was cancelled
    assert job.switched(0, 2, 9, 0.0, 7.0) == []


def test_one_of_two_newcomers_dies() -> None:
    job = training(2)
    job.asked(wish(4), 0.0)
    reason = "the new worker 3 was killed by signal 9 before it joined"
    assert job.gone(3, "was killed by signal 9", 1.0) == [End(2, reason), Refused(wish(4), reason)]
    assert phase_of(job) is Phase.STEADY
    assert job.members == (0, 1)
    assert job.gone(2, "was killed by signal 9", 1.1) == []  # we did that


def test_a_newcomer_that_does_not_fit() -> None:
    job = training(1)
    job.asked(wish(2), 0.0)
    reason = "the new worker 1 does not fit: its threads is '2', the job's '1'"
    assert job.ready(1, ALIKE | {"threads": "2"}, 1.0) == [End(1, reason), Refused(wish(2), reason)]


@pytest.mark.parametrize("workers", [0, 9, -1])
def test_what_cannot_be(workers: int) -> None:
    (answer,) = training(2).asked(wish(workers), 0.0)
    assert isinstance(answer, Refused)
    assert "ask for 1 to 8" in answer.reason


def test_one_change_at_a_time() -> None:
    early = coordinator(2)
    assert early.asked(wish(3), 0.0) == [Refused(wish(3), "the job has not begun to train yet; retry")]
    job = training(2)
    job.asked(wish(3), 0.0)
    assert job.asked(wish(4), 0.0) == [
        Refused(wish(4), "busy with another change (to 3 workers, starting); retry")
    ]
    assert training(2).asked(wish(2), 0.0) == [Done(wish(2), 0, 2, 2, 0.0, 0.0, ())]


def test_a_schedule_is_prepared_ahead_and_tried_again() -> None:
    plan = changes(1, [(10, 2), (20, 2), (30, 1)])
    assert [(change.at_step, change.workers) for change in plan] == [(10, 2), (30, 1)]
    job = coordinator(1, schedule=list(plan))
    assert job.started(ALIKE, 0, 8, 0.0) == [Start(1)]
    assert job.gone(1, "died", 1.0) == [Start(2)]
    job.ready(2, ALIKE, 2.0)
    job.prepared(0, 2)
    assert job.prepared(2, 2) == [Tell(0, SetFence(2, 10))]
    done, *then = job.switched(2, 2, 10, 0.0, 3.0)
    assert isinstance(done, Done)
    assert then == [Tell(member, Prepare(plan_for(3, (0,), (), donor=0))) for member in (0, 2)]


def test_a_schedule_that_cannot_be_kept() -> None:
    job = coordinator(1, schedule=changes(1, [(10, 2)]))
    job.started(ALIKE, 0, 8, 0.0)
    assert job.gone(1, "died", 1.0) == [Start(2)]
    assert job.gone(2, "died", 2.0) == [Start(3)]
    (last,) = job.gone(3, "died", 3.0)
    assert last == GiveUp("the new worker 3 died before it joined; --schedule wants 2 workers at step 10")


def test_a_resumed_job_takes_up_its_schedule() -> None:
    """Of what lies before the checkpoint only the last counts, as soon as can be; what lies at it is waited for."""
    job = coordinator(1, schedule=changes(1, [(10, 2), (20, 4), (40, 1)]))
    assert job.started(ALIKE, 25, 8, 0.0) == [Start(1), Start(2), Start(3)]
    job = coordinator(1, schedule=changes(1, [(10, 2), (20, 4), (40, 1)]))
    assert job.started(ALIKE, 20, 8, 0.0) == [Start(1)]


def test_the_end_of_the_job_ends_newcomers() -> None:
    job = training(1)
    job.asked(wish(3), 0.0)
    assert job.over() == [
        End(1, "the job ended before it could join"),
        End(2, "the job ended before it could join"),
        Refused(wish(3), "the job ended before the change could be made"),
    ]
    assert job.asked(wish(2), 1.0) == [Refused(wish(2), "the job has not begun to train yet; retry")]


def taken_over(job: Coordinator, now: float = 100.0) -> tuple[Coordinator, list[Instruction]]:
    """The next leader's coordinator, from what lies in the lease store, and what it does first."""
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(job.record()), type=CoordinatorRecord)
    successor = Coordinator.restore(kept, store=lambda generation: f"other-store-{generation}")
    return successor, successor.took_over(now)


def test_a_new_leader_of_a_steady_job_does_nothing() -> None:
    successor, first = taken_over(training(3))
    assert first == []
    assert (successor.members, successor.generation, phase_of(successor)) == ((0, 1, 2), 1, Phase.STEADY)
    assert successor.started(ALIKE, 0, 8, 101.0) == []  # workers say it again
    assert successor.asked(wish(4), 102.0) == [Start(3)]


def test_a_new_leader_calls_off_what_has_not_been_fenced() -> None:
    job, reason = training(2), "the job's leader has changed meanwhile; retry"
    job.asked(wish(4), 0.0)
    successor, first = taken_over(job)
    assert first == [End(2, reason), End(3, reason), Refused(wish(4), reason)]
    assert successor.asked(wish(4), 101.0) == [Start(4), Start(5)]

    for member in (2, 3):
        job.ready(member, ALIKE, 1.0)
    job.prepared(0, 2)
    successor, first = taken_over(job)
    assert first == [
        End(2, reason),
        End(3, reason),
        Tell(0, Cancel(2)),
        Tell(1, Cancel(2)),
        Refused(wish(4), reason),
    ]
    assert successor.prepared(1, 2) == []
    assert (successor.generation, successor.members) == (2, (0, 1))


def test_a_new_leader_keeps_a_fence_that_may_hold_already() -> None:
    job, change = training(2), wish(3)
    job.asked(change, 0.0)
    job.ready(2, ALIKE, 1.0)
    for member in (0, 1, 2):
        job.prepared(member, 2)
    successor, first = taken_over(job)
    assert first == [Tell(0, SetFence(2, 0)), Tell(1, SetFence(2, 0))]
    assert successor.request() == "r1"
    assert successor.switched(2, 2, 7, 0.5, 103.0) == [Done(change, 7, 2, 3, 0.5, 3.0, (2,))]
    assert successor.members == (0, 1, 2)


def test_a_new_leader_keeps_to_the_schedule() -> None:
    job = coordinator(1, schedule=changes(1, [(10, 2), (30, 1)]))
    job.started(ALIKE, 0, 8, 0.0)
    successor, first = taken_over(job)
    assert first == [End(1, "the job's leader has changed meanwhile; retry"), Start(2)]
    successor.ready(2, ALIKE, 101.0)
    successor.prepared(0, 2)
    assert successor.prepared(2, 2) == [Tell(0, SetFence(2, 10))]


def test_a_new_leader_of_a_job_that_has_not_begun_waits_for_it() -> None:
    successor, first = taken_over(coordinator(2, schedule=changes(2, [(3, 1)])))
    assert first == []
    (prepare, _) = successor.started(ALIKE, 0, 8, 101.0)
    assert isinstance(prepare, Tell)


@dataclass
class World:
    """Plays everybody else: processes that start, connect, switch or die, in any order."""

    job: Coordinator
    starting: set[int] = field(default_factory=set)
    connecting: dict[int, int] = field(default_factory=dict)
    fenced: dict[int, set[int]] = field(default_factory=dict)
    answered: int = 0
    generations: list[int] = field(default_factory=lambda: [1])

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Start(member=member):
                    self.starting.add(member)
                case End(member=member):
                    self.starting.discard(member)
                    self.connecting.pop(member, None)
                case Tell(member=member, message=Prepare(plan=plan)):
                    self.starting.discard(member)
                    self.connecting[member] = plan.generation
                case Tell(member=member, message=SetFence(generation=generation)):
                    self.fenced.setdefault(generation, set()).add(member)
                case Tell(member=member, message=Cancel(generation=generation)):
                    self.connecting.pop(member, None)
                    self.fenced.pop(generation, None)
                case Done() | Refused():
                    self.answered += 1


@given(st.data())
def test_no_interleaving_breaks_it(data: st.DataObject) -> None:
    """Every request is answered, once; a fence is set only when all are connected; generations only go up; numbers of members
    are never used twice; a death before the fence leaves the members as they were; a new leader changes nothing of that.
    """
    world = World(training(2))
    job, asked, time = world.job, 0, 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        time += 1.0
        deeds = ["ask"]
        deeds += ["ready"] * bool(world.starting) + ["die"] * any(job.is_newcomer(m) for m in range(200))
        deeds += ["connect"] * bool(world.connecting) + ["switch"] * bool(world.fenced) + ["take over"]
        match data.draw(st.sampled_from(deeds)):
            case "ask":
                asked += 1
                world.obey(job.asked(wish(data.draw(st.integers(0, 9))), time))
            case "ready":
                world.obey(job.ready(data.draw(st.sampled_from(sorted(world.starting))), ALIKE, time))
            case "connect":
                member = data.draw(st.sampled_from(sorted(world.connecting)))
                world.obey(job.prepared(member, world.connecting.pop(member)))
            case "switch":
                generation = max(world.fenced)
                assert not world.connecting, "a fence was set before all were connected"
                assert world.fenced.pop(generation) == set(job.members)
                newcomers = [m for m in range(200) if job.is_newcomer(m)]
                said: list[int] = []
                for member in newcomers or [job.members[0]]:
                    if said and data.draw(st.integers(0, 1)):  # a new leader hears again what the one before knew
                        world.job, first = taken_over(job, time)
                        job = world.job
                        world.obey(first)
                        for other in said:
                            world.obey(job.switched(other, generation, int(time), 0.1, time))
                    world.obey(job.switched(member, generation, int(time), 0.1, time))
                    said.append(member)
                world.fenced.pop(generation, None)
                world.generations.append(job.generation)
            case "take over":
                fenced = job.phase is Phase.FENCED
                before = job.members
                world.job, first = taken_over(job, time)
                job = world.job
                world.obey(first)
                assert job.members == before
                assert job.phase is (Phase.FENCED if fenced else Phase.STEADY)
            case "die":
                before = job.members
                victim = data.draw(st.sampled_from([m for m in range(200) if job.is_newcomer(m)]))
                world.starting.discard(victim)
                world.connecting.pop(victim, None)
                world.obey(job.gone(victim, "died", time))
                assert job.members == before
                assert phase_of(job) is Phase.STEADY
        assert len(set(job.members)) == len(job.members)
        assert world.generations == sorted(set(world.generations))
        assert asked - world.answered == (job.phase is not Phase.STEADY)
