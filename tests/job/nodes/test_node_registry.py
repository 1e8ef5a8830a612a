"""Which worker is on which node, and what happens to messages that cannot be sent."""

from __future__ import annotations

from collections.abc import Iterable

from gyrostat.core.job import Assignment
from gyrostat.core.placement import Placement
from gyrostat.job.nodes.messages import Instruct, SignalWorker, StartWorker, TellWorker
from gyrostat.job.nodes.node_registry import NodeRegistry, place
from gyrostat.job.processes.protocol import Cancel, Program, WorkerId

PROGRAM = Program(name="train.py")


def worker_id(member: int, attempt: int = 0) -> WorkerId:
    return WorkerId(attempt, member)


class Place:
    """A node that keeps what it was sent."""

    def __init__(self) -> None:
        self.got: list[Instruct] = []

    def send(self, instruct: Instruct) -> None:
        self.got.append(instruct)


def registry(nodes: Iterable[str]) -> tuple[NodeRegistry, dict[str, Place]]:
    made = NodeRegistry(
        PROGRAM, store=lambda attempt: f"tcp://h:1/{attempt}", keep=lambda record: True, node_timeout=10.0
    )
    places = {name: Place() for name in nodes}
    for name, where in places.items():
        made.came(name, where.send, [], 0.0)
    return made, places


def assignment(workers: int) -> Assignment:
    return Assignment(placement=Placement.even(8, workers))


JOINS = Assignment(placement=Placement.even(8, 1), joins=True)


def test_a_crew_is_laid_out_in_order() -> None:
    assert [place(worker_id(member), 5, ["a", "b"], {}) for member in range(5)] == ["a", "a", "a", "b", "b"]
    assert [place(worker_id(member), 2, ["a", "b", "c"], {}) for member in range(2)] == ["a", "b"]


def test_a_new_worker_goes_to_the_node_with_the_fewest() -> None:
    where = {worker_id(0): "a", worker_id(1): "b", worker_id(2): "a", worker_id(7, attempt=3): "b"}
    assert place(worker_id(4), 0, ["a", "b", "c"], where) == "c"
    assert place(worker_id(4), 0, ["a", "b"], where) == "b"
    assert place(worker_id(4, attempt=3), 0, ["a", "b"], where) == "a"


def test_messages_reach_the_node_of_their_worker() -> None:
    job, places = registry(["a", "b"])
    for member in range(2):
        job.start(worker_id(member), assignment(2))
    job.tell(worker_id(1), Cancel(4))
    job.signal(worker_id(0), 15)
    assert places["a"].got == [
        StartWorker(worker_id(0), assignment(2), PROGRAM),
        SignalWorker(worker_id(0), 15),
    ]
    assert places["b"].got == [
        StartWorker(worker_id(1), assignment(2), PROGRAM),
        TellWorker(worker_id(1), Cancel(4)),
    ]
    job.gone(worker_id(1))
    job.signal(worker_id(1), 9)  # to nobody
    assert len(places["b"].got) == 2


def test_messages_wait_for_a_disconnected_agent() -> None:
    job, places = registry(["a", "b"])
    for member in range(2):
        job.start(worker_id(member), assignment(2))
    job.went("b", places["b"].send, 5.0)
    job.tell(worker_id(1), Cancel(4))
    assert job.present() == ["a"]
    assert job.deadline() == 15.0
    again = Place()
    assert job.came("b", again.send, [worker_id(1)], 6.0) == []
    assert again.got == [TellWorker(worker_id(1), Cancel(4))]
    assert job.deadline() is None
    job.went("b", places["b"].send, 7.0)  # the old connection breaks late: nothing happens
    assert job.present() == ["a", "b"]


def test_a_node_that_stays_away_is_given_up() -> None:
    job, places = registry(["a", "b"])
    for member in range(2):
        job.start(worker_id(member), assignment(2))
    job.went("b", places["b"].send, 5.0)
    assert job.overdue(14.9) == []
    assert job.overdue(15.0) == [(worker_id(1), "the agent of b has been away for 10 s")]
    job.gone(worker_id(1))
    assert job.overdue(100.0) == []
    assert list(job.nodes) == ["a"]


def test_an_agent_that_comes_back_without_its_workers() -> None:
    job, places = registry(["a"])
    job.start(worker_id(0), assignment(2))
    job.start(worker_id(1), JOINS)
    job.went("a", places["a"].send, 1.0)
    assert job.came("a", Place().send, [worker_id(1)], 2.0) == [worker_id(0)]


def test_workers_of_a_job_that_was_taken_over() -> None:
    """They are where agents show them; nobody knows what has become of those that nobody shows."""
    job, places = registry(["a"])
    job.came("a", places["a"].send, [worker_id(0)], 0.0)
    job.expect([worker_id(0), worker_id(1), worker_id(2)], None, 1.0)
    job.tell(worker_id(1), Cancel(2))
    other = Place()
    job.came("b", other.send, [worker_id(1)], 2.0)
    assert other.got == [TellWorker(worker_id(1), Cancel(2))]
    assert job.overdue(10.9) == []
    assert job.overdue(11.0) == [(worker_id(2), "no agent has shown it for 10 s")]


def test_a_worker_that_no_node_has_started() -> None:
    """All nodes that may have been asked to start it are connected, and none has it: nobody waits for it."""
    job, _ = registry(["a"])
    job.expect([worker_id(0)], ["a", "b"], 1.0)
    assert job.may_have_workers() == ["a", "b"]
    assert job.overdue(1.0) == []
    job.came("c", Place().send, [], 1.5)
    assert job.overdue(1.5) == []
    job.came("b", Place().send, [], 2.0)
    assert job.overdue(2.0) == [(worker_id(0), "no agent has started it")]


def test_nobody_is_sent_to_a_node_that_leaves() -> None:
    job, _ = registry(["a", "b"])
    job.nodes["a"].leaving = True
    job.start(worker_id(0), JOINS)
    assert job.workers_of("b") == [worker_id(0)]
    job.nodes["b"].leaving = True
    job.start(worker_id(1), JOINS)  # better there than nowhere
    assert job.workers_of("a") == [worker_id(1)]
