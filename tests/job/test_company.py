"""Which worker is where, and what happens to what cannot be told."""

from __future__ import annotations

from collections.abc import Iterable

from gyrostat.core.job import Assignment
from gyrostat.core.placement import Placement
from gyrostat.job.company import Company, place
from gyrostat.job.conversation import Instruct, SignalWorker, StartWorker, TellWorker
from gyrostat.job.protocol import Cancel, Program, Seat

PROGRAM = Program(name="train.py")


def seat(member: int, attempt: int = 0) -> Seat:
    return Seat(attempt, member)


class Place:
    """A node that keeps what it was sent."""

    def __init__(self) -> None:
        self.got: list[Instruct] = []

    def send(self, instruct: Instruct) -> None:
        self.got.append(instruct)


def company(nodes: Iterable[str]) -> tuple[Company, dict[str, Place]]:
    made = Company(
        PROGRAM, store=lambda attempt: f"tcp://h:1/{attempt}", keep=lambda record: True, patience=10.0
    )
    places = {name: Place() for name in nodes}
    for name, where in places.items():
        made.came(name, where.send, [], 0.0)
    return made, places


def crew(workers: int) -> Assignment:
    return Assignment(placement=Placement.even(8, workers))


JOINS = Assignment(placement=Placement.even(8, 1), joins=True)


def test_a_crew_is_laid_out_in_order() -> None:
    assert [place(seat(member), 5, ["a", "b"], {}) for member in range(5)] == ["a", "a", "a", "b", "b"]
    assert [place(seat(member), 2, ["a", "b", "c"], {}) for member in range(2)] == ["a", "b"]


def test_who_joins_goes_where_the_fewest_are() -> None:
    where = {seat(0): "a", seat(1): "b", seat(2): "a", seat(7, attempt=3): "b"}
    assert place(seat(4), 0, ["a", "b", "c"], where) == "c"
    assert place(seat(4), 0, ["a", "b"], where) == "b"
    assert place(seat(4, attempt=3), 0, ["a", "b"], where) == "a"


def test_everybody_is_told_where_he_is() -> None:
    job, places = company(["a", "b"])
    for member in range(2):
        job.start(seat(member), crew(2))
    job.tell(seat(1), Cancel(4))
    job.signal(seat(0), 15)
    assert places["a"].got == [StartWorker(seat(0), crew(2), PROGRAM), SignalWorker(seat(0), 15)]
    assert places["b"].got == [StartWorker(seat(1), crew(2), PROGRAM), TellWorker(seat(1), Cancel(4))]
    job.gone(seat(1))
    job.signal(seat(1), 9)  # to nobody
    assert len(places["b"].got) == 2


def test_what_cannot_be_told_waits_for_the_agent() -> None:
    job, places = company(["a", "b"])
    for member in range(2):
        job.start(seat(member), crew(2))
    job.went("b", places["b"].send, 5.0)
    job.tell(seat(1), Cancel(4))
    assert job.present() == ["a"]
    assert job.deadline() == 15.0
    again = Place()
    assert job.came("b", again.send, [seat(1)], 6.0) == []
    assert again.got == [TellWorker(seat(1), Cancel(4))]
    assert job.deadline() is None
    job.went("b", places["b"].send, 7.0)  # the old connection breaks late: nothing happens
    assert job.present() == ["a", "b"]


def test_who_stays_away_is_given_up() -> None:
    job, places = company(["a", "b"])
    for member in range(2):
        job.start(seat(member), crew(2))
    job.went("b", places["b"].send, 5.0)
    assert job.overdue(14.9) == []
    assert job.overdue(15.0) == [(seat(1), "the agent of b has been away for 10 s")]
    job.gone(seat(1))
    assert job.overdue(100.0) == []
    assert list(job.nodes) == ["a"]


def test_an_agent_that_comes_back_without_its_workers() -> None:
    job, places = company(["a"])
    job.start(seat(0), crew(2))
    job.start(seat(1), JOINS)
    job.went("a", places["a"].send, 1.0)
    assert job.came("a", Place().send, [seat(1)], 2.0) == [seat(0)]


def test_workers_of_a_job_that_was_taken_over() -> None:
    """They are where agents show them; nobody knows what has become of those that nobody shows."""
    job, places = company(["a"])
    job.came("a", places["a"].send, [seat(0)], 0.0)
    job.expect([seat(0), seat(1), seat(2)], 1.0)
    job.tell(seat(1), Cancel(2))
    other = Place()
    job.came("b", other.send, [seat(1)], 2.0)
    assert other.got == [TellWorker(seat(1), Cancel(2))]
    assert job.overdue(10.9) == []
    assert job.overdue(11.0) == [(seat(2), "no agent has shown it for 10 s")]


def test_nobody_is_sent_to_a_node_that_leaves() -> None:
    job, _ = company(["a", "b"])
    job.nodes["a"].leaving = True
    job.start(seat(0), JOINS)
    assert job.workers_of("b") == [seat(0)]
    job.nodes["b"].leaving = True
    job.start(seat(1), JOINS)  # better there than nowhere
    assert job.workers_of("a") == [seat(1)]
