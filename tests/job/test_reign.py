"""An agent's time as leader, with a real lease store and nodes that only note what they are sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.placement import Placement
from gyrostat.job.conversation import (
    Answered,
    Asking,
    Attending,
    Dismissed,
    Gone,
    Instruct,
    JobOver,
    Leaving,
    Said,
    SignalWorker,
    StartWorker,
    TellWorker,
    Welcome,
    WorkerFacts,
)
from gyrostat.job.door import AskStatus, Scale, Status
from gyrostat.job.lease import Lease, LeaseStore, open_store
from gyrostat.job.observer import Nobody
from gyrostat.job.protocol import Ended, Finished, Program, Seat, Started, Step, Steps, Terminate
from gyrostat.job.reign import Kept, Over, Reign, Seal, read_kept
from gyrostat.job.request import RunRequest
from gyrostat.job.service import Session

STARTED = Started(0, None, [], 0.0, 4, None, {})


@pytest.fixture
def store(tmp_path: Path) -> LeaseStore:
    return open_store(f"file://{tmp_path}/store")


@pytest.fixture
def job(tmp_path: Path) -> RunRequest:
    (tmp_path / "train.py").write_text("")
    return RunRequest(
        program=Program(name="train.py"),
        placement=Placement.even(4, 2),
        cwd=tmp_path,
        name="j",
        silence_s=0.0,
    )


class Node:
    """This agent's own node, or another's."""

    def __init__(self, name: str, workers: list[WorkerFacts] | None = None, run: str = "run") -> None:
        self.session = Session(Attending(name, run, workers or []))
        self.got: list[Instruct] = []

    def near(self, instruct: Instruct) -> None:
        self.got.append(instruct)

    def take(self) -> list[Instruct]:
        got, self.got = self.got, []
        while not self.session.outgoing.empty():
            if (instruct := self.session.outgoing.get()) is not None:
                got.append(instruct)
        return got


def reign_over(job: RunRequest, store: LeaseStore, a: Node) -> Reign:
    lease = store.acquire("h:1", 60.0)
    assert isinstance(lease, Lease)
    seal = Seal(store=store, token=lease.token, run="run", address="h:1", rendezvous="tcp://h:2")
    reign = Reign(job, Nobody(), seal, nodes=2, patience=60.0)
    kept = read_kept(store)
    reign.begin("a", a.near, a.session.attending.workers, kept.record if kept is not None else None)
    return reign


def trained_by_two(job: RunRequest, store: LeaseStore) -> tuple[Reign, Node, Node]:
    a, b = Node("a"), Node("b")
    reign = reign_over(job, store, a)
    reign.tick()
    assert a.take() == []  # one of two: the job waits
    reign.came(b.session)
    reign.tick()
    assert [type(each) for each in a.take()] == [StartWorker]
    assert [type(each) for each in b.take()] == [Welcome, StartWorker]
    reign.take("a", Said(Seat(0, 0), STARTED))
    reign.take("a", Said(Seat(0, 0), Steps([Step(1, 0, 0.5, 4, 1.0)])))
    return reign, a, b


def test_a_job_from_its_beginning_to_its_end(job: RunRequest, store: LeaseStore) -> None:
    reign, _, b = trained_by_two(job, store)
    reign.reported(b.session, [Asking(7, AskStatus())])
    (answered,) = b.take()
    assert isinstance(answered, Answered)
    assert isinstance(answered.reply, Status)
    assert (answered.reply.leader, answered.reply.nodes) == ("h:1", ("a", "b"))
    for name, seat in (("a", Seat(0, 0)), ("b", Seat(0, 1))):
        for message in (Finished(9, "d1", 2.0), Ended(stopped=False)):
            reign.take(name, Said(seat, message))
        reign.take(name, Gone(seat, 0))
    reign.tick()
    outcome = reign.leader.outcome
    assert outcome is not None
    assert reign.conclude(outcome) == Over(0, "digest d1")
    assert b.take() == [JobOver(0, "digest d1")]
    assert read_kept(store) == Kept(run="run", over=Over(0, "digest d1"))


def test_a_node_leaves(job: RunRequest, store: LeaseStore) -> None:
    reign, a, b = trained_by_two(job, store)
    reign.take("b", Leaving())
    reign.tick()
    assert [type(each) for each in (*a.take(), *b.take())] == [
        TellWorker,
        TellWorker,
    ]  # a generation without it
    reign.take("b", Gone(Seat(0, 1), 0))
    reign.tick()
    assert b.take() == [Dismissed()]


def test_when_all_leave_the_job_stops(job: RunRequest, store: LeaseStore) -> None:
    reign, a, b = trained_by_two(job, store)
    for name in ("a", "b"):
        reign.take(name, Leaving())
    for _ in range(3):
        reign.tick()
    assert a.take() == [TellWorker(Seat(0, 0), Terminate())]  # once
    assert b.take() == [TellWorker(Seat(0, 1), Terminate())]


def test_the_next_leader_finds_workers_and_questions_again(job: RunRequest, store: LeaseStore) -> None:
    before, _, _ = trained_by_two(job, store)
    before.take("b", Asking(1, Scale("r", 3)))
    store.release(Lease("h:1", before.seal.token))
    b = Node("b", [WorkerFacts(Seat(0, 1), [])])
    reign = reign_over(job, store, b_as_own := Node("a"))
    assert reign.seal.token > before.seal.token
    assert b_as_own.take() == []
    reign.came(b.session)
    assert b.take() == [Welcome("run")]
    assert reign.company.out_of_reach() == [Seat(0, 0), Seat(0, 2)]  # and the newcomer, which is to be ended
    reign.take("b", Asking(1, Scale("r", 3)))
    started = [each for each in (*b_as_own.take(), *b.take()) if isinstance(each, StartWorker)]
    assert [each.seat for each in started] == [Seat(0, 3)]
    c = Node("c", [WorkerFacts(Seat(0, 0), [STARTED]), WorkerFacts(Seat(0, 2), [])])
    reign.came(c.session)
    assert SignalWorker(Seat(0, 2), 9) in c.take()


def test_workers_of_another_run_do_not_count(job: RunRequest, store: LeaseStore) -> None:
    reign, _, _ = trained_by_two(job, store)
    stranger = Node("c", [WorkerFacts(Seat(0, 0), [Ended(stopped=False)])], run="another")
    reign.came(stranger.session)
    assert stranger.take() == [Welcome("run")]
    assert reign.company.workers_of("c") == []


def test_an_old_connection_says_nothing_any_more(job: RunRequest, store: LeaseStore) -> None:
    reign, _, b = trained_by_two(job, store)
    again = Node("b", [WorkerFacts(Seat(0, 1), [])])
    reign.came(again.session)
    reign.reported(b.session, [Gone(Seat(0, 1), -9)])
    reign.went(b.session)
    assert reign.company.present() == ["a", "b"]
    assert reign.company.workers_of("b") == [Seat(0, 1)]


def test_what_another_version_has_kept_is_refused(store: LeaseStore) -> None:
    assert read_kept(store) is None
    lease = store.acquire("h:1", 60.0)
    assert isinstance(lease, Lease)
    store.put("record", b"\x81\xa3run\x07", lease.token)
    with pytest.raises(UsageError, match="another version"):
        read_kept(store)
