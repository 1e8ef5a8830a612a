"""Who is blamed, and what is ordered, compared exactly."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM, SIGUSR1

from gyrostat.core.evidence import Evidence, RunningMicroBatch
from gyrostat.job.control.worker_tracker import (
    BLAME_GRACE_S,
    KILL_GRACE_S,
    RESTARTABLE,
    FailureCause,
    SendSignal,
    WorkerTracker,
)
from gyrostat.job.diagnostics.poison import Death
from gyrostat.job.processes.protocol import Failed, FailureKind, WorkerEnded

RAISED = Failed(FailureKind.SCRIPT, "ValueError: boom", "Traceback: boom")
MISUSED = Failed(FailureKind.USAGE, "Misuse: no", "Traceback: no")
LOST = Failed(FailureKind.PEER_LOST, "PeerLost: worker 1 is gone", "Traceback: lost")
WELL = WorkerEnded(stopped=False)


def test_a_good_end_needs_no_orders() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=False)
    for worker in (0, 1):
        watch.ended(worker, WELL)
        watch.exited(worker, 0, 1.0)
        assert watch.orders(1.0) == []
    assert watch.over
    assert watch.failure() is None
    assert watch.codes == {0: 0, 1: 0}


def test_an_exception_ends_the_others_and_then_kills_them() -> None:
    watch = WorkerTracker(list(range(3)), checkpoints=False)
    watch.failed(1, RAISED, 10.0)
    assert watch.orders(10.0) == [SendSignal(SIGTERM, (0, 2))]
    assert watch.orders(10.1) == []
    watch.exited(1, 1, 10.2)
    watch.exited(0, -SIGTERM, 10.2)
    assert watch.deadline() == 10.0 + KILL_GRACE_S
    assert watch.orders(10.0 + KILL_GRACE_S) == [SendSignal(SIGKILL, (2,))]
    assert watch.deadline() is None
    watch.exited(2, -SIGKILL, 16.0)
    failure = watch.failure()
    assert failure is not None
    assert str(failure) == "worker 1 raised ValueError: boom"
    assert (failure.traceback, failure.exit_code) == ("Traceback: boom", 1)


def test_misuse_has_its_own_exit_code() -> None:
    watch = WorkerTracker(list(range(1)), checkpoints=False)
    watch.failed(0, MISUSED, 0.0)
    failure = watch.failure()
    assert failure is not None
    assert failure.exit_code == 2


def test_what_the_job_cannot_use_is_one_message() -> None:
    watch = WorkerTracker(list(range(1)), checkpoints=False)
    watch.failed(0, Failed(FailureKind.REFUSED, "checkpoint a is of another job", "Traceback: a"), 0.0)
    failure = watch.failure()
    assert failure is not None
    assert str(failure) == "checkpoint a is of another job"
    assert (failure.traceback, failure.exit_code) == (None, 2)


def test_a_lost_peer_is_not_blamed_when_the_dead_one_turns_up() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=False)
    watch.failed(0, LOST, 1.0)
    assert watch.orders(1.0) == []
    watch.exited(0, 1, 1.1)
    assert watch.orders(1.1) == []
    watch.exited(1, -SIGKILL, 1.2)
    failure = watch.failure()
    assert failure is not None
    assert (failure.worker, failure.cause, failure.exit_code) == (1, FailureCause.KILLED, 128 + SIGKILL)
    assert failure.summary == "was killed by SIGKILL"


def test_a_lost_peer_is_blamed_when_nobody_else_turns_up() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=False)
    watch.failed(0, LOST, 1.0)
    assert watch.deadline() == 1.0 + BLAME_GRACE_S
    assert watch.orders(1.0 + BLAME_GRACE_S) == [SendSignal(SIGTERM, (1,))]
    failure = watch.failure()
    assert failure is not None
    assert str(failure) == "worker 0 lost a peer: PeerLost: worker 1 is gone"


def test_an_exit_code_is_a_failure_by_itself() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=False)
    watch.failed(0, LOST, 1.0)
    watch.exited(1, 7, 1.2)
    assert watch.orders(1.2) == []  # the only one left has said that it is leaving
    failure = watch.failure()
    assert failure is not None
    assert (str(failure), failure.exit_code) == ("worker 1 exited with code 7", 7)


def test_a_worker_that_exits_without_a_report_is_blamed_only_if_a_peer_is_lost() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=False)
    watch.exited(1, 0, 1.0)
    assert watch.failure() is None
    assert watch.orders(1.0 + BLAME_GRACE_S) == []
    assert watch.deadline() is None
    watch.failed(0, LOST, 5.0)
    failure = watch.failure()
    assert failure is not None
    assert str(failure) == "worker 1 exited before its script had ended"


def test_workers_that_have_all_left_without_a_word_have_no_result() -> None:
    """Their scripts have not reached their end. They would do it again, so that is no reason to start again."""
    watch = WorkerTracker(list(range(2)), checkpoints=True)
    watch.exited(1, 0, 1.0)
    assert watch.failure() is None  # the other one may not need it
    watch.exited(0, 0, 2.0)
    failure = watch.failure()
    assert failure is not None
    assert (str(failure), failure.exit_code) == ("worker 1 exited before its script had ended", 1)
    assert failure.cause not in RESTARTABLE


def test_a_worker_that_ends_its_process_when_it_is_asked_to_stop_has_not_failed() -> None:
    watch = WorkerTracker(list(range(1)), checkpoints=False)
    watch.signalled(SIGTERM, 1.0)
    watch.exited(0, 0, 2.0)
    assert watch.failure() is None


def test_a_crash_after_the_last_word_is_a_failure() -> None:
    watch = WorkerTracker(list(range(1)), checkpoints=False)
    watch.ended(0, WELL)
    watch.exited(0, -SIGSEGV, 1.0)
    failure = watch.failure()
    assert failure is not None
    assert str(failure) == "worker 0 was killed by SIGSEGV"


def test_a_stop_waits_for_the_boundary_if_there_are_checkpoints() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=True)
    assert watch.began() == []
    assert watch.signalled(SIGTERM, 1.0) == [SendSignal(SIGTERM, (0, 1))]
    assert watch.deadline() is None
    for worker in (0, 1):
        watch.ended(worker, WorkerEnded(stopped=True))
        watch.exited(worker, 0, 60.0)
    assert watch.stopped
    assert watch.stopped_by == SIGTERM
    assert watch.failure() is None


def test_a_worker_reports_which_signal_stopped_the_job() -> None:
    """It was signalled directly, or by a leader that has gone."""
    watch = WorkerTracker([0, 1], checkpoints=True)
    watch.ended(0, WorkerEnded(stopped=True))
    watch.ended(1, WorkerEnded(stopped=True, asked_by=SIGTERM))
    for worker in (0, 1):
        watch.exited(worker, 0, 1.0)
    assert watch.stopped_by == SIGTERM
    assert watch.failure() is watch.without_result() is None


def test_workers_that_stop_the_job_unasked_were_orphaned() -> None:
    watch = WorkerTracker([0, 1], checkpoints=True)
    for worker in (0, 1):
        watch.ended(worker, WorkerEnded(stopped=True))
        watch.exited(worker, 0, 1.0)
    assert watch.orders(100.0) == []
    failure = watch.without_result()
    assert failure is not None
    assert str(failure) == "worker 0 stopped the job, because its agent was away"
    assert failure.exit_code == 1


def test_a_stop_has_a_grace_if_there_are_none() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=False)
    assert watch.signalled(SIGINT, 1.0) == [SendSignal(SIGINT, (0, 1))]
    watch.exited(0, -SIGINT, 1.1)
    watch.failed(1, LOST, 1.2)
    assert watch.orders(1.2) == []
    assert watch.orders(1.0 + KILL_GRACE_S) == [SendSignal(SIGKILL, (1,))]
    watch.exited(1, -SIGKILL, 7.0)
    assert watch.failure() is None
    assert not watch.stopped


def test_the_second_stop_kills_at_once() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=True)
    watch.signalled(SIGINT, 1.0)
    assert watch.signalled(SIGINT, 1.5) == [SendSignal(SIGKILL, (0, 1))]


def test_a_hangup_is_passed_on_as_a_request_to_end() -> None:
    assert WorkerTracker(list(range(1)), checkpoints=True).signalled(SIGHUP, 1.0) == [
        SendSignal(SIGTERM, (0,))
    ]


def test_a_stop_before_training_has_a_grace_too() -> None:
    watch = WorkerTracker(list(range(1)), checkpoints=True)
    watch.signalled(SIGTERM, 1.0)
    assert watch.deadline() == 1.0 + KILL_GRACE_S


def test_one_worker_is_asked_for_a_checkpoint_and_nothing_stops() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=True)
    watch.began()
    assert watch.signalled(SIGUSR1, 1.0) == [SendSignal(SIGUSR1, (0,))]
    assert watch.stopped_by is None


def test_a_checkpoint_that_is_asked_for_too_early_is_not_forgotten() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=True)
    assert watch.signalled(SIGUSR1, 1.0) == []
    assert watch.began() == [SendSignal(SIGUSR1, (0,))]
    assert watch.began() == []


def test_an_exception_on_the_way_to_a_stop_is_still_a_failure() -> None:
    watch = WorkerTracker(list(range(2)), checkpoints=True)
    watch.signalled(SIGTERM, 1.0)
    watch.failed(1, RAISED, 2.0)
    assert watch.orders(2.0) == [SendSignal(SIGTERM, (0,))]
    failure = watch.failure()
    assert failure is not None
    assert failure.worker == 1


def test_a_worker_that_leaves_has_a_grace_period() -> None:
    watch = WorkerTracker([0, 1, 2], checkpoints=False)
    watch.leaving(1, 40.0)
    watch.leaving(1, 50.0)  # asking again does not prolong it
    watch.leaving(2, 45.0)
    assert watch.deadline() == 40.0
    assert watch.orders(39.9) == []
    watch.ended(2, WorkerEnded(stopped=False, left=True))
    watch.exited(2, 0, 39.9)
    assert watch.orders(40.0) == [SendSignal(SIGKILL, (1,))]
    assert watch.deadline() is None
    watch.exited(1, -SIGKILL, 40.1)
    assert str(watch.failure()) == (
        "worker 1 was asked to leave by SIGTERM, and no boundary to leave at came within its grace"
    )


BATCH = RunningMicroBatch(step=4, rank=1, number=0, samples=(3, 9), size=2)


def test_out_of_memory_is_what_the_kernel_says() -> None:
    watch = WorkerTracker([0, 1], checkpoints=True)
    evidence = Evidence(running=BATCH, lines=("loading",), out_of_memory="oom_kill in x went from 0 to 1")
    watch.exited(1, -SIGKILL, 1.0, evidence)
    assert watch.orders(1.0) == [SendSignal(SIGTERM, (0,))]
    failure = watch.failure()
    assert failure is not None
    assert (failure.cause, failure.evidence) == (FailureCause.MEMORY, evidence)
    assert str(failure) == ("worker 1 was killed by SIGKILL: out of memory (oom_kill in x went from 0 to 1)")
    assert failure.evidence.describe() == [
        "out of memory: oom_kill in x went from 0 to 1",
        "it was running micro-batch 0 of virtual worker 1 in the step after step 4, samples 3, 9",
        "the last it printed:",
        "    loading",
    ]
    assert watch.deaths == []  # whose memory it was that ran out, nobody knows


def test_the_death_that_is_one_too_many() -> None:
    """Deaths of earlier attempts count."""
    deaths: list[Death] = []
    for attempt in range(3):
        watch = WorkerTracker([0, 1], checkpoints=True, deaths=deaths)
        watch.exited(attempt % 2, -SIGSEGV, 1.0, Evidence(running=BATCH))
        failure = watch.failure()
        assert failure is not None
        assert failure.cause is (FailureCause.POISON if attempt == 2 else FailureCause.KILLED)
    assert failure is not None
    assert failure.summary == (
        "was killed by SIGSEGV; 3 workers have died while this micro-batch was running: micro-batch 0 of virtual worker 1 in "
        "the step after step 4, samples 3, 9"
    )


def test_a_worker_that_is_ended_with_the_job_did_not_die_of_its_micro_batch() -> None:
    deaths: list[Death] = []
    watch = WorkerTracker([0, 1], checkpoints=True, deaths=deaths)
    watch.failed(0, RAISED, 1.0)
    watch.orders(1.0)
    watch.exited(1, -SIGKILL, 1.1, Evidence(running=BATCH))
    watch.exited(0, 1, 1.1, Evidence(running=BATCH, lines=("before",)))
    assert deaths == []
    failure = watch.failure()
    assert failure is not None
    assert (failure.cause, failure.evidence.running) == (FailureCause.RAISED, BATCH)


def test_a_hanging_worker_is_ended_with_that_reason() -> None:
    watch = WorkerTracker([0, 1], checkpoints=True)
    assert watch.hangs({1: "train.py:3 in f"}) == [SendSignal(SIGKILL, (1,))]
    watch.exited(1, -SIGKILL, 1.0, Evidence(running=BATCH))
    assert str(watch.failure()) == "worker 1 was ended by the watchdog: it hung at train.py:3 in f"
    assert [death.running for death in watch.deaths] == [BATCH]
