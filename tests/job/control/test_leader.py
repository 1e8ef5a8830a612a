"""A leader and what it has done: nothing before it is kept, and what is kept is enough for the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from gyrostat.core.job import Assignment, CheckpointPolicy, RecoveryMode, TrainingOptions
from gyrostat.core.phase import JobPhase
from gyrostat.core.placement import Placement
from gyrostat.data.shards.messages import Shard
from gyrostat.job.control.executor import LeaderRecord
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.control.leader import Leader
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.requests import AskStatus, Migrate, Reply, RequestResult, Scale, Status
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.control.shard_service import OpenShards, Pulled, PullShard
from gyrostat.job.processes.protocol import (
    BeginRecovery,
    Failed,
    FailureKind,
    FromWorker,
    GenerationPrepared,
    Ping,
    Pong,
    Prepare,
    Program,
    Ready,
    Recovered,
    SetFence,
    Started,
    StepReport,
    StepReports,
    Switched,
    Terminate,
    WorkerEnded,
    WorkerId,
)

ALIKE = {"seed": "1"}


@dataclass
class Executor:
    """Records instructions. `keeps`: whether the lease store can be reached; `away`: the members whose agent is away."""

    keeps: bool = True
    away: set[int] = field(default_factory=set)
    done: list[tuple[str, int, object]] = field(default_factory=list)
    record: LeaderRecord | None = None

    def start(self, worker_id: WorkerId, assignment: Assignment) -> None:
        self.done.append(("start", worker_id.member, worker_id.attempt))

    def tell(self, worker_id: WorkerId, message: msgspec.Struct) -> None:
        self.done.append(("tell", worker_id.member, type(message)))

    def signal(self, worker_id: WorkerId, number: int) -> None:
        self.done.append(("signal", worker_id.member, number))

    def reaches(self, worker_id: WorkerId) -> bool:
        return worker_id.member not in self.away

    def store(self, attempt: int, generation: int) -> str:
        return f"tcp://h:1/{attempt}"

    def traces(self, attempt: int) -> Path | None:
        return None

    def keep(self, record: Callable[[], LeaderRecord]) -> bool:
        if self.keeps:
            self.record = record()
        return self.keeps

    def take(self) -> list[tuple[str, int, object]]:
        done, self.done = self.done, []
        return done


@dataclass
class Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class FakeRequester:
    replies: list[Reply] = field(default_factory=list)

    def answer(self, reply: Reply) -> None:
        self.replies.append(reply)


@pytest.fixture
def request_(tmp_path: Path) -> RunRequest:
    (tmp_path / "train.py").write_text("")
    return RunRequest(
        program=Program(name="train.py"),
        placement=Placement.even(4, 2),
        options=TrainingOptions(
            checkpoint=CheckpointPolicy(directory=str(tmp_path / "ckpt")), recovery=RecoveryMode.CHECKPOINT
        ),
        failures=FailurePolicy(restarts=1, heartbeat_timeout_s=0.0),
        cwd=tmp_path,
    )


def training(request: RunRequest, executor: Executor) -> Leader:
    leader = Leader(request, executor, NullObserver())
    leader.begin()
    assert executor.take() == [("start", 0, 0), ("start", 1, 0)]
    say(leader, 0, started(0))
    say(leader, 0, StepReports([StepReport(5, 0, 0.1, 8, 1.0)]))
    return leader


def started(step: int) -> Started:
    return Started(step, None, [], 0.0, 4, None, ALIKE)


def say(leader: Leader, member: int, message: FromWorker, attempt: int = 0) -> None:
    leader.heard(WorkerId(attempt, member), message)


def successor(request: RunRequest, before: Executor) -> tuple[Leader, Executor]:
    """The next leader, from what the one before has kept."""
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(before.record), type=LeaderRecord)
    executor = Executor()
    leader = Leader(request, executor, NullObserver())
    leader.take_over(kept)
    return leader, executor


def status(leader: Leader) -> Status:
    requester = FakeRequester()
    leader.asked(AskStatus(), requester)
    (reply,) = requester.replies
    assert isinstance(reply, Status)
    return reply


def test_a_client_that_waits_for_the_first_step_gets_one_reply(request_: RunRequest) -> None:
    leader = Leader(request_, Executor(), NullObserver())
    leader.begin()
    early, late = FakeRequester(), FakeRequester()
    leader.asked(AskStatus(after_a_step=True), early)
    say(leader, 0, started(0))
    assert early.replies == []
    for step in (1, 2):
        say(leader, 0, StepReports([StepReport(step, 0, 0.1, 8, 1.0)]))
    leader.asked(AskStatus(after_a_step=True), late)
    assert [reply.step for reply in (*early.replies, *late.replies) if isinstance(reply, Status)] == [1, 2]


def test_nothing_is_done_before_it_is_kept(request_: RunRequest) -> None:
    executor, requester = Executor(), FakeRequester()
    leader = training(request_, executor)
    executor.keeps = False
    leader.asked(Scale("r", 3), requester)
    leader.tick()
    assert executor.take() == []
    assert requester.replies == []
    assert leader.deadline() is not None  # it will be tried again
    executor.keeps = True
    leader.tick()
    assert executor.take() == [("start", 2, 0)]
    assert leader.deadline() is None
    executor.keeps = False
    leader.asked(Scale("other", 1), busy := FakeRequester())
    assert busy.replies == []  # an answer is kept first, too


def test_the_next_leader_finishes_what_was_fenced_and_answers_for_the_one_before(
    request_: RunRequest,
) -> None:
    executor = Executor()
    leader = training(request_, executor)
    leader.asked(Scale("r", 3), FakeRequester())
    say(leader, 2, Ready(ALIKE))
    for member in (0, 1, 2):
        say(leader, member, GenerationPrepared(2))
    assert [what for what in executor.take() if what[2] is SetFence] == [
        ("tell", 0, SetFence),
        ("tell", 1, SetFence),
    ]

    second, again = successor(request_, executor)
    assert again.take() == [("tell", 0, SetFence), ("tell", 1, SetFence)]
    requester = FakeRequester()
    second.asked(Scale("r", 3), requester)  # the client asks again: it is under way
    assert requester.replies == []
    say(second, 2, Switched(2, 9, 3, 0.25))
    assert requester.replies == [
        RequestResult(True, "3 workers since step 9", 9, 3, 250.0, prepare_ms(requester))
    ]
    assert status(second).members == (0, 1, 2)

    third, _ = successor(request_, again)
    third.asked(Scale("r", 3), late := FakeRequester())  # done long ago
    assert late.replies == requester.replies


@pytest.mark.parametrize("keeps", [True, False])
def test_a_newcomer_with_which_others_have_begun_is_lost_like_a_member(
    request_: RunRequest, keeps: bool
) -> None:
    """It has lost the donor and fails, although the generation has begun. The others recover without it, also while the record
    for the next leader cannot be kept."""
    executor = Executor()
    leader = training(replace(request_, options=TrainingOptions()), executor)
    leader.asked(Scale("r", 3), FakeRequester())
    say(leader, 2, Ready(ALIKE))
    for member in (0, 1, 2):
        say(leader, member, GenerationPrepared(2))
    say(leader, 0, Switched(2, 9, 3, 0.25))
    executor.take()
    executor.keeps = keeps
    say(leader, 2, Failed(FailureKind.PEER_LOST, "PeerLost: the donor", ""))
    leader.exited(WorkerId(0, 2), 1)
    executor.keeps = True
    leader.tick()
    assert executor.take() == [("tell", 0, BeginRecovery), ("tell", 1, BeginRecovery)]
    assert leader.outcome is None


def test_the_last_worker_leaves_and_the_one_in_its_place_dies(request_: RunRequest) -> None:
    """It has left at the fence before anybody knew that the new one had died: there is no result, and the job restarts."""
    executor = Executor()
    leader = Leader(replace(request_, placement=Placement.even(4, 1)), executor, NullObserver())
    leader.begin()
    say(leader, 0, started(0))
    say(leader, 0, StepReports([StepReport(5, 0, 0.1, 8, 1.0)]))
    leader.asked(Migrate("r", (0,)), FakeRequester())
    say(leader, 1, Ready(ALIKE))
    for member in (0, 1):
        say(leader, member, GenerationPrepared(2))
    leader.exited(WorkerId(0, 1), -9)
    say(leader, 0, WorkerEnded(stopped=False, left=True))
    leader.exited(WorkerId(0, 0), 0)
    leader.tick()
    assert leader.outcome is None
    assert leader.phase is JobPhase.STARTING
    assert executor.take()[-1] == ("start", 0, 1)


def prepare_ms(requester: FakeRequester) -> float:
    """How long it took to prepare is the clock's business."""
    (reply,) = requester.replies
    assert isinstance(reply, RequestResult)
    return reply.prepare_ms


def test_the_next_leader_begins_anew_what_was_not_fenced(request_: RunRequest) -> None:
    executor = Executor()
    leader = training(request_, executor)
    leader.asked(Scale("r", 3), FakeRequester())
    say(leader, 2, Ready(ALIKE))
    assert {what[2] for what in executor.take()[1:]} == {Prepare}
    second, again = successor(request_, executor)
    assert again.take()[0] == ("signal", 2, 9)
    second.asked(Scale("r", 3), FakeRequester())
    assert again.take() == [("start", 3, 0)]


def test_a_suspended_job_is_resumed_by_the_next_leader(request_: RunRequest) -> None:
    executor, requester = Executor(), FakeRequester()
    leader = training(request_, executor)
    leader.asked(Scale("down", 0), requester)
    assert executor.take() == [("tell", 0, Terminate), ("tell", 1, Terminate)]

    second, again = successor(request_, executor)  # suspends it in its place
    assert again.take() == [("tell", 0, Terminate), ("tell", 1, Terminate)]
    second.asked(Scale("down", 0), requester)
    say(second, 0, StepReports([StepReport(7, 0, 0.1, 8, 1.0)]))
    for member in (0, 1):
        say(second, member, WorkerEnded(stopped=True))
        second.exited(WorkerId(0, member), 0)
    second.tick()
    assert [reply.text for reply in requester.replies if isinstance(reply, RequestResult)] == [
        "suspended after step 7, until it is given workers again"
    ]

    third, last = successor(request_, again)
    found = status(third)
    assert (found.phase, found.workers, found.step) == (JobPhase.SUSPENDED, 0, 7)
    assert last.take() == []
    third.asked(Scale("up", 1), up := FakeRequester())
    assert last.take() == [("start", 0, 1)]
    say(third, 0, started(7), attempt=1)
    (answer,) = up.replies
    assert isinstance(answer, RequestResult)
    assert (answer.done, answer.workers, answer.step) == (True, 1, 7)


def test_a_worker_whose_agent_is_away_is_not_silent(
    request_: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can hear it. When its agent is back it has as long to answer as any other."""
    clock = Clock()
    monkeypatch.setattr("gyrostat.job.control.leader.time", clock)
    executor = Executor(away={1})
    leader = training(
        replace(request_, failures=FailurePolicy(restarts=1, heartbeat_timeout_s=4.0)), executor
    )

    def wait(seconds: int) -> list[tuple[str, int, object]]:
        for _ in range(seconds):
            clock.now += 1.0
            leader.tick()
            say(leader, 0, Pong())
        return executor.take()

    assert set(wait(10)) == {("tell", 0, Ping)}
    executor.away.clear()
    assert ("signal", 1, 9) not in wait(4)
    assert ("signal", 1, 9) in wait(2)


def test_nothing_is_due_for_workers_that_nobody_waits_for(
    request_: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline in the past that no tick removes would keep the event loop busy."""
    clock = Clock()
    monkeypatch.setattr("gyrostat.job.control.leader.time", clock)
    failures = FailurePolicy(restarts=1, heartbeat_timeout_s=4.0)
    leader = training(replace(request_, failures=failures, options=TrainingOptions()), Executor())
    leader.tick()
    assert leader.deadline() == 1.0
    leader.exited(WorkerId(0, 1), -9)
    say(leader, 0, Recovered(2, Placement.even(4, 1), 0, 0.0))
    say(leader, 0, Ready(ALIKE))
    for _ in range(3):
        clock.now += 100.0
        leader.tick()
        deadline = leader.deadline()
        assert deadline is None or deadline > clock.now


def test_the_phases_of_a_job(request_: RunRequest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="gyrostat.job.control.leader")
    executor = Executor()
    leader = Leader(request_, executor, NullObserver())
    phases = [status(leader).phase]
    leader.begin()
    phases.append(status(leader).phase)
    say(leader, 0, started(0))
    phases.append(status(leader).phase)
    for member in (0, 1):
        leader.exited(WorkerId(0, member), -9)
    leader.tick()  # the first restart is immediate
    phases.append(status(leader).phase)
    say(leader, 0, started(0), attempt=1)
    phases.append(status(leader).phase)
    say(leader, 0, WorkerEnded(stopped=True), attempt=1)
    phases.append(status(leader).phase)
    assert phases == [
        JobPhase.WAITING_FOR_NODES,
        JobPhase.STARTING,
        JobPhase.TRAINING,
        JobPhase.STARTING,
        JobPhase.TRAINING,
        JobPhase.ENDING,
    ]
    said = [record.getMessage() for record in caplog.records]
    assert "starting again, was training" in said  # between the two attempts
    leader.asked(Scale("late", 1), late := FakeRequester())
    (refused,) = late.replies
    assert isinstance(refused, RequestResult)
    assert refused.retryable
    for member in (0, 1):
        leader.exited(WorkerId(1, member), 0)
    leader.tick()
    assert status(leader).phase is JobPhase.ENDED
    assert leader.outcome is not None


def test_workers_that_nobody_finds_again_cost_an_attempt(request_: RunRequest) -> None:
    executor = Executor()
    training(request_, executor)
    leader, again = successor(request_, executor)
    leader.lost(WorkerId(0, 1), "no agent has shown it for 60 s")
    leader.tick()
    assert again.take() == [("tell", 0, Terminate)]
    leader.exited(WorkerId(0, 0), -15)
    leader.tick()
    assert again.take() == [("start", 0, 1), ("start", 1, 1)]
    say(leader, 0, WorkerEnded(stopped=False))  # of the attempt before: nobody listens
    assert leader.outcome is None


def stopped_by_nobody(leader: Leader, attempt: int) -> None:
    for member in (0, 1):
        say(leader, member, WorkerEnded(stopped=True), attempt=attempt)
        leader.exited(WorkerId(attempt, member), 0)
    leader.tick()


def test_a_job_that_nobody_asked_to_stop_goes_on_from_its_checkpoint(request_: RunRequest) -> None:
    """Its workers had no agent for some time. When there are no restarts left, that is a failure."""
    executor = Executor()
    leader = training(request_, executor)
    stopped_by_nobody(leader, 0)
    assert executor.take() == [("start", 0, 1), ("start", 1, 1)]
    say(leader, 0, started(7), attempt=1)
    stopped_by_nobody(leader, 1)
    assert leader.outcome is not None
    assert (leader.outcome.exit_code, leader.outcome.stopped) == (1, True)
    assert str(leader.outcome.failure) == "worker 0 stopped the job, because its agent was away"


def test_queues_of_shards_are_kept_before_anything_is_handed_out(request_: RunRequest) -> None:
    executor, requester = Executor(), FakeRequester()
    leader = Leader(request_, executor, NullObserver())
    leader.asked(OpenShards("train", 100, 10), requester)
    leader.asked(PullShard("train", "w", 0, epoch=0), requester)
    executor.keeps = False
    leader.tick()
    assert requester.replies == []
    executor.keeps = True
    leader.tick()
    opened, pulled = requester.replies
    assert isinstance(opened, RequestResult)
    assert isinstance(pulled, Pulled)
    assert isinstance(pulled.shard, Shard)

    second, _ = successor(request_, executor)
    assert not second.has_begun
    assert status(second).phase is JobPhase.WAITING_FOR_NODES
    second.asked(PullShard("train", "w", 0, epoch=0), again := FakeRequester())
    second.tick()
    assert again.replies == [pulled]


def test_the_next_leader_knows_that_training_has_begun(request_: RunRequest) -> None:
    """Though nothing was to be done when it began: a death is the end of a job that does not train yet, and only of that."""
    executor = Executor()
    training(request_, executor)
    assert executor.record is not None
    assert executor.record.coordinator is not None
    assert executor.record.coordinator.training
