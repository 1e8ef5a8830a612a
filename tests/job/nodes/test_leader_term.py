"""An agent's time as leader, with a real lease store and nodes that only note what they are sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.placement import Placement
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.requests import AskStatus, Migrate, Request, Scale, ScaleBy, Status
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.control.shard_service import OpenShards, PullShard
from gyrostat.job.nodes.leader_term import JobOutcome, LeaderTerm, LeaseGrant, TermRecord, read_kept
from gyrostat.job.nodes.lease import Lease, LeaseStore, open_store
from gyrostat.job.nodes.messages import (
    ForwardedReply,
    ForwardedRequest,
    Instruct,
    JobOver,
    NodeAttending,
    NodeDismissed,
    NodeLeaving,
    NodeWelcome,
    SignalWorker,
    StartWorker,
    TellWorker,
    WorkerFacts,
    WorkerGone,
    WorkerSaid,
    decode_request,
    encode,
)
from gyrostat.job.nodes.service import NodeSession
from gyrostat.job.processes.channel import ProtocolError
from gyrostat.job.processes.protocol import (
    Program,
    Started,
    StepReport,
    StepReports,
    Terminate,
    WorkerEnded,
    WorkerFinished,
    WorkerId,
)

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
        failures=FailurePolicy(heartbeat_timeout_s=0.0),
    )


class Node:
    """This agent's own node, or another's."""

    def __init__(self, name: str, workers: list[WorkerFacts] | None = None, run: str = "run") -> None:
        self.session = NodeSession(NodeAttending(name, run, workers or []))
        self.got: list[Instruct] = []

    def near(self, instruct: Instruct) -> None:
        self.got.append(instruct)

    def take(self) -> list[Instruct]:
        got, self.got = self.got, []
        while not self.session.outgoing.empty():
            if (instruct := self.session.outgoing.get()) is not None:
                got.append(instruct)
        return got


def reign_over(job: RunRequest, store: LeaseStore, a: Node) -> LeaderTerm:
    lease = store.acquire("h:1", 60.0)
    assert isinstance(lease, Lease)
    grant = LeaseGrant(store=store, token=lease.token, run="run", address="h:1", rendezvous="tcp://h:2")
    term = LeaderTerm(job, NullObserver(), grant, nodes=2, node_timeout=60.0)
    term.begin("a", a.near, a.session.attending.workers, read_kept(store))
    return term


def trained_by_two(job: RunRequest, store: LeaseStore) -> tuple[LeaderTerm, Node, Node]:
    a, b = Node("a"), Node("b")
    term = reign_over(job, store, a)
    term.tick()
    assert a.take() == []  # one of two: the job waits
    term.came(b.session)
    term.tick()
    assert [type(each) for each in a.take()] == [StartWorker]
    assert [type(each) for each in b.take()] == [NodeWelcome, StartWorker]
    term.take("a", WorkerSaid(WorkerId(0, 0), STARTED))
    term.take("a", WorkerSaid(WorkerId(0, 0), StepReports([StepReport(1, 0, 0.5, 4, 1.0)])))
    return term, a, b


def test_a_job_from_its_beginning_to_its_end(job: RunRequest, store: LeaseStore) -> None:
    term, _, b = trained_by_two(job, store)
    term.reported(b.session, [ForwardedRequest(7, AskStatus())])
    (answered,) = b.take()
    assert isinstance(answered, ForwardedReply)
    assert isinstance(answered.reply, Status)
    assert (answered.reply.leader, answered.reply.nodes) == ("h:1", ("a", "b"))
    for name, worker_id in (("a", WorkerId(0, 0)), ("b", WorkerId(0, 1))):
        for message in (WorkerFinished(9, "d1", 2.0), WorkerEnded(stopped=False)):
            term.take(name, WorkerSaid(worker_id, message))
        term.take(name, WorkerGone(worker_id, 0))
    term.tick()
    outcome = term.leader.outcome
    assert outcome is not None
    assert term.conclude(outcome) == JobOutcome(0, "digest d1")
    assert b.take() == [JobOver(0, "digest d1")]
    assert read_kept(store) == TermRecord(run="run", over=JobOutcome(0, "digest d1"))


def test_a_node_leaves(job: RunRequest, store: LeaseStore) -> None:
    term, a, b = trained_by_two(job, store)
    term.take("b", NodeLeaving())
    term.tick()
    assert [type(each) for each in (*a.take(), *b.take())] == [
        TellWorker,
        TellWorker,
    ]  # a generation without it
    term.take("b", WorkerGone(WorkerId(0, 1), 0))
    term.tick()
    assert b.take() == [NodeDismissed()]


def test_when_all_leave_the_job_stops(job: RunRequest, store: LeaseStore) -> None:
    term, a, b = trained_by_two(job, store)
    for name in ("a", "b"):
        term.take(name, NodeLeaving())
    for _ in range(3):
        term.tick()
    assert a.take() == [TellWorker(WorkerId(0, 0), Terminate())]  # once
    assert b.take() == [TellWorker(WorkerId(0, 1), Terminate())]


def test_the_next_leader_finds_workers_and_questions_again(job: RunRequest, store: LeaseStore) -> None:
    before, _, _ = trained_by_two(job, store)
    before.take("b", ForwardedRequest(1, Scale("r", 3)))
    store.release(Lease("h:1", before.grant.token))
    b = Node("b", [WorkerFacts(WorkerId(0, 1), [])])
    term = reign_over(job, store, b_as_own := Node("a"))
    assert term.grant.token > before.grant.token
    assert b_as_own.take() == []
    term.came(b.session)
    assert b.take() == [NodeWelcome("run")]
    assert term.registry.out_of_reach() == [
        WorkerId(0, 0),
        WorkerId(0, 2),
    ]  # and the newcomer, which is to be ended
    term.take("b", ForwardedRequest(1, Scale("r", 3)))
    started = [each for each in (*b_as_own.take(), *b.take()) if isinstance(each, StartWorker)]
    assert [each.worker_id for each in started] == [WorkerId(0, 3)]
    c = Node("c", [WorkerFacts(WorkerId(0, 0), [STARTED]), WorkerFacts(WorkerId(0, 2), [])])
    term.came(c.session)
    assert SignalWorker(WorkerId(0, 2), 9) in c.take()


def test_a_leader_that_was_killed_while_it_started_the_workers(job: RunRequest, store: LeaseStore) -> None:
    """Agent b has not started its worker, and says so: nothing was trained, so all start again, without any checkpoint. The
    worker that was started before is ended."""
    job = replace(job, failures=replace(job.failures, restarts=1))
    a, b = Node("a"), Node("b")
    before = reign_over(job, store, a)
    before.came(b.session)
    before.tick()
    assert [type(each) for each in a.take()] == [StartWorker]
    store.release(Lease("h:1", before.grant.token))
    again, b = Node("a", [WorkerFacts(WorkerId(0, 0), [])]), Node("b")
    term = reign_over(job, store, again)
    term.tick()
    assert again.take() == []  # b may have it
    term.came(b.session)
    term.tick()
    term.tick()
    assert again.take() == [TellWorker(WorkerId(0, 0), Terminate(final=True))]
    term.take("a", WorkerGone(WorkerId(0, 0), -9))
    term.tick()
    started = [each for each in (*again.take(), *b.take()) if isinstance(each, StartWorker)]
    assert [each.worker_id for each in started] == [WorkerId(1, 0), WorkerId(1, 1)]
    late = Node("c", [WorkerFacts(WorkerId(0, 1), [])])
    term.came(late.session)
    assert SignalWorker(WorkerId(0, 1), 9) in late.take()


def test_a_record_that_can_never_be_kept_ends_the_job(
    job: RunRequest, store: LeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not tried again and again: the loop would do nothing else, and no death would be noticed."""
    term, a, b = trained_by_two(job, store)
    with monkeypatch.context() as patch:
        patch.setattr("gyrostat.job.nodes.lease.base.LARGEST_VALUE", 10)
        term.take("b", ForwardedRequest(1, Scale("r", 3)))
        term.tick()
        ends = Terminate(final=True)
        assert (a.take(), b.take()) == (
            [TellWorker(WorkerId(0, 0), ends)],
            [TellWorker(WorkerId(0, 1), ends)],
        )
    for name, worker_id in (("a", WorkerId(0, 0)), ("b", WorkerId(0, 1))):
        term.take(name, WorkerGone(worker_id, -15))
    term.tick()
    assert term.leader.outcome is not None
    over = term.conclude(term.leader.outcome)
    assert over is not None
    assert (over.code, "cannot go on: the record for the next leader" in over.text) == (1, True)


@pytest.mark.parametrize(
    "request_",
    [
        Migrate("r", tuple(range(300_000))),
        ScaleBy("r", -300_000, tuple(range(300_000))),
        Scale("r" * 1000, 2),
        PullShard("q" * 1000, "w", 0, None),
        PullShard("q", "w" * 1000, 0, None),
        PullShard("q", "w", 0, None, offsets=((0, 0),) * 100_000),
        OpenShards("q" * 1000, 10, 1),
    ],
    ids=lambda request: type(request).__name__,
)
def test_what_a_client_sends_is_bounded(request_: Request) -> None:
    with pytest.raises(ProtocolError, match=r"Expected `(array|str)` of length <= "):
        decode_request(encode(request_))


def test_workers_of_another_run_do_not_count(job: RunRequest, store: LeaseStore) -> None:
    term, _, _ = trained_by_two(job, store)
    stranger = Node("c", [WorkerFacts(WorkerId(0, 0), [WorkerEnded(stopped=False)])], run="another")
    term.came(stranger.session)
    assert stranger.take() == [NodeWelcome("run")]
    assert term.registry.workers_of("c") == []


def test_an_old_connection_says_nothing_any_more(job: RunRequest, store: LeaseStore) -> None:
    term, _, b = trained_by_two(job, store)
    again = Node("b", [WorkerFacts(WorkerId(0, 1), [])])
    term.came(again.session)
    term.reported(b.session, [WorkerGone(WorkerId(0, 1), -9)])
    term.went(b.session)
    assert term.registry.present() == ["a", "b"]
    assert term.registry.workers_of("b") == [WorkerId(0, 1)]


def test_what_another_version_has_kept_is_refused(store: LeaseStore) -> None:
    assert read_kept(store) is None
    lease = store.acquire("h:1", 60.0)
    assert isinstance(lease, Lease)
    store.put("record", b"\x81\xa3run\x07", lease.token)
    with pytest.raises(UsageError, match="another version"):
        read_kept(store)
