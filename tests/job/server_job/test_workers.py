"""Which worker processes of a server job are started, asked to leave and killed: exact orders, without processes."""

from __future__ import annotations

import signal

import pytest

from gyrostat.core.evidence import NO_EVIDENCE, Evidence, RunningMicroBatch
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.control.worker_tracker import FailureCause
from gyrostat.job.processes.protocol import Failed, FailureKind, WorkerEnded
from gyrostat.job.server_job.poison import ShardInHand
from gyrostat.job.server_job.workers import ServerWorkers, SignalMember, StartMember, WorkerFate

KILLED = -signal.SIGKILL
SHARD = ShardInHand(epoch=1, start=512, stop=1024)


def workers(target: int = 2, *, poison_limit: int = 3, restarts: int = 3) -> ServerWorkers:
    return ServerWorkers(target, FailurePolicy(poison_limit=poison_limit, restarts=restarts, grace_s=30.0))


def started(target: int = 2, **policy: int) -> ServerWorkers:
    found = workers(target, **policy)
    found.orders(0, now=0.0)
    for member in found.living:
        found.started(member)
    return found


def dies(found: ServerWorkers, member: int, updates: int, now: float = 1.0) -> WorkerFate:
    return found.exited(member, KILLED, NO_EVIDENCE, None, updates, now).fate


def test_begins_with_its_target() -> None:
    found = workers(3)
    assert found.orders(0, now=0.0) == [StartMember(0), StartMember(1), StartMember(2)]
    assert found.orders(0, now=0.1) == []
    assert not found.settled
    for member in (0, 1, 2):
        found.started(member)
    assert found.settled


def test_a_dead_worker_is_replaced_at_once_if_the_job_has_made_progress() -> None:
    found = started()
    assert dies(found, 1, updates=5) is WorkerFate.DIED
    assert found.orders(5, now=1.0) == [StartMember(2)]
    assert found.members == (0, 2)


def test_deaths_without_progress_are_followed_by_delays_that_double() -> None:
    found = started(1)
    delays, now = [], 10.0
    for member in (0, 1, 2):
        assert dies(found, member, updates=0, now=now) is WorkerFate.DIED
        due = found.deadline(now)
        assert due is not None
        delays.append(due - now)
        assert found.orders(0, now=due - 0.01) == []
        assert found.orders(0, now=due) == [StartMember(member + 1)]
        now = due
    assert delays == [1.0, 2.0, 4.0]


def test_too_many_deaths_in_a_row_without_progress_end_the_job() -> None:
    found = started(1, restarts=1)
    assert dies(found, 0, updates=0, now=0.0) is WorkerFate.DIED
    found.orders(0, now=1.0)
    assert dies(found, 1, updates=0, now=1.0) is WorkerFate.FAILED
    assert found.failure is not None
    assert found.failure.cause is FailureCause.KILLED
    assert str(found.failure) == (
        "worker 1 was killed by SIGKILL; 2 workers in a row have died without progress of the job"
    )
    assert found.orders(0, now=2.0) == []
    assert found.over


def test_progress_ends_a_row_of_deaths() -> None:
    found = started(1, restarts=1)
    for member in range(20):
        assert dies(found, member, updates=member + 1, now=float(member)) is WorkerFate.DIED
        assert found.orders(member + 1, now=float(member)) == [StartMember(member + 1)]


def test_fewer_workers_the_newest_leave_and_are_killed_after_their_grace() -> None:
    found = started(3)
    found.resize(1, now=10.0)
    term = [SignalMember(1, signal.SIGTERM), SignalMember(2, signal.SIGTERM)]
    assert found.orders(7, now=10.0) == term
    assert found.orders(7, now=11.0) == []
    found.reported_end(2, WorkerEnded(stopped=True))
    assert found.exited(2, 0, NO_EVIDENCE, None, 8, 12.0).fate is WorkerFate.LEFT
    assert found.deadline(12.0) == 40.0
    assert found.orders(8, now=40.0) == [SignalMember(1, signal.SIGKILL)]
    assert found.exited(1, KILLED, NO_EVIDENCE, None, 9, 40.1).fate is WorkerFate.LEFT
    assert found.settled
    assert found.deaths == 0


def test_named_workers_are_replaced() -> None:
    found = started(2)
    found.resize(2, (0,), now=5.0)
    assert found.orders(3, now=5.0) == [StartMember(2), SignalMember(0, signal.SIGTERM)]
    assert found.members == (1, 2)


def test_a_worker_that_leaves_by_itself_is_replaced() -> None:
    found = started(1)
    found.reported_end(0, WorkerEnded(stopped=True))
    assert found.exited(0, 0, NO_EVIDENCE, None, 4, 1.0).fate is WorkerFate.LEFT
    assert found.orders(4, now=1.0) == [StartMember(1)]


@pytest.mark.parametrize(
    ("kind", "cause", "exit_code", "text"),
    [
        (FailureKind.SCRIPT, FailureCause.RAISED, 1, "worker 0 raised ValueError: x"),
        (FailureKind.USAGE, FailureCause.RAISED, 2, "worker 0 raised ValueError: x"),
        (FailureKind.REFUSED, FailureCause.REFUSED, 2, "ValueError: x"),
    ],
)
def test_a_script_that_raises_ends_the_job(
    kind: FailureKind, cause: FailureCause, exit_code: int, text: str
) -> None:
    found = started(2)
    found.reported_failure(0, Failed(kind, "ValueError: x", "Traceback …"))
    assert found.exited(0, exit_code, NO_EVIDENCE, None, 3, 1.0).fate is WorkerFate.FAILED
    assert found.failure is not None
    assert (found.failure.cause, found.failure.exit_code, str(found.failure)) == (cause, exit_code, text)
    assert found.orders(3, now=1.0) == [SignalMember(1, signal.SIGTERM)]
    assert found.orders(3, now=6.0) == [SignalMember(1, signal.SIGKILL)]
    found.exited(1, KILLED, NO_EVIDENCE, None, 3, 6.1)
    assert found.over


def test_an_exit_code_of_the_script_is_the_jobs() -> None:
    found = started(1)
    assert found.exited(0, 7, NO_EVIDENCE, None, 3, 1.0).fate is WorkerFate.FAILED
    assert found.failure is not None
    assert found.failure.exit_code == 7


def test_out_of_memory_ends_the_job() -> None:
    found = started(1)
    evidence = Evidence(out_of_memory="cgroup limit of 1 GiB")
    assert found.exited(0, KILLED, evidence, None, 3, 1.0).fate is WorkerFate.FAILED
    assert found.failure is not None
    assert found.failure.cause is FailureCause.MEMORY


def test_a_shard_on_which_three_workers_die_ends_the_job_with_its_evidence() -> None:
    found = started(1)
    for member in (0, 1):
        assert found.exited(member, KILLED, NO_EVIDENCE, SHARD, 9 + member, 1.0).fate is WorkerFate.DIED
        found.orders(9 + member, now=1.0)
    assert found.exited(2, KILLED, NO_EVIDENCE, SHARD, 20, 2.0).fate is WorkerFate.FAILED
    assert found.failure is not None
    assert found.failure.cause is FailureCause.POISON
    assert str(found.failure) == (
        "worker 2 was killed by SIGKILL; 3 workers have died of the same work: shard of samples 512 to 1023 of epoch 1"
    )


def test_deaths_on_other_micro_batches_of_one_shard_are_no_poison() -> None:
    found = started(1)
    for member in range(6):
        running = RunningMicroBatch(step=member, rank=0, number=0, samples=(member,), size=1)
        exit_ = found.exited(member, KILLED, Evidence(running=running), SHARD, member + 1, 1.0)
        assert exit_.fate is WorkerFate.DIED
        assert "it held the shard of samples 512 to 1023 of epoch 1" in exit_.evidence
        found.orders(member + 1, now=1.0)


def test_the_same_micro_batch_is_poison_in_any_shard() -> None:
    found = started(1)
    running = RunningMicroBatch(step=3, rank=0, number=0, samples=(7, 8), size=2)
    fates = []
    for member in range(3):
        held = ShardInHand(epoch=1, start=0, stop=512 * (member + 1))
        fates.append(found.exited(member, KILLED, Evidence(running=running), held, member + 1, 1.0).fate)
        found.orders(member + 1, now=1.0)
    assert fates == [WorkerFate.DIED, WorkerFate.DIED, WorkerFate.FAILED]


def test_workers_that_the_job_kills_are_no_evidence_of_poison() -> None:
    found = started(1)
    for member in range(5):
        assert found.kill(member, "was lost: silent for 1 s") == [SignalMember(member, signal.SIGKILL)]
        assert found.exited(member, KILLED, NO_EVIDENCE, SHARD, member + 1, 1.0).fate is WorkerFate.DIED
        found.orders(member + 1, now=1.0)
    assert found.kill(17, "unknown") == []


def test_when_one_has_finished_the_dead_are_not_replaced() -> None:
    found = started(2)
    found.reported_end(0, WorkerEnded(stopped=False))
    assert found.exited(0, 0, NO_EVIDENCE, None, 100, 5.0).fate is WorkerFate.FINISHED
    assert dies(found, 1, updates=100, now=5.0) is WorkerFate.DIED
    assert found.orders(100, now=6.0) == []
    assert found.over
    assert found.failure is None


def test_a_stop_gives_grace_once_and_kills_the_second_time() -> None:
    found = started(2)
    found.end(now=10.0)
    assert found.orders(5, now=10.0) == [SignalMember(0, signal.SIGTERM), SignalMember(1, signal.SIGTERM)]
    found.end(now=11.0, at_once=True)
    assert found.orders(5, now=11.0) == [SignalMember(0, signal.SIGKILL), SignalMember(1, signal.SIGKILL)]
    for member in (0, 1):
        assert dies(found, member, 5, 11.1) is WorkerFate.LEFT
    assert found.over
    assert found.codes == {0: KILLED, 1: KILLED}


def test_no_workers_at_all_is_not_the_end() -> None:
    found = started(1)
    found.resize(0, now=1.0)
    found.orders(4, now=1.0)
    found.reported_end(0, WorkerEnded(stopped=True))
    found.exited(0, 0, NO_EVIDENCE, None, 4, 1.5)
    assert found.settled
    assert not found.over
    found.resize(2, now=9.0)
    assert found.orders(4, now=9.0) == [StartMember(1), StartMember(2)]
