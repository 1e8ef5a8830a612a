"""The leader of a server job: what it orders, answers and concludes, without processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gyrostat.core.events import EventKind
from gyrostat.core.phase import JobPhase
from gyrostat.core.roles import ProcessRole
from gyrostat.job.control.device_assignment import DeviceAssignment, Slot
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.requests import (
    AskCheckpoint,
    AskStatus,
    AskStop,
    Migrate,
    Occupy,
    ProfileJob,
    RequestResult,
    Scale,
    ScaleBy,
    ScaleRoles,
    Status,
    Vacate,
)
from gyrostat.job.control.worker_tracker import FailureCause
from gyrostat.job.processes.protocol import Failed, FailureKind, StepReports
from gyrostat.job.server_job.poison import ShardInHand
from gyrostat.job.server_job.port import ServerProgress, ServersCheckpointed, ServersHappened
from tests.job.server_job.fake_servers import Client, FakeJob

KILLED = -signal.SIGKILL


@pytest.fixture
def job(tmp_path: Path) -> FakeJob:
    found = FakeJob(tmp_path)
    found.begin_training()
    return found


def result(client: Client) -> RequestResult:
    (reply,) = client.replies
    assert isinstance(reply, RequestResult)
    return reply


def outcome(job: FakeJob) -> Outcome:
    job.leader.tick()
    assert job.leader.outcome is not None
    return job.leader.outcome


def test_workers_get_the_leaders_address_and_a_name_of_their_own(job: FakeJob) -> None:
    job.train(1, 4)
    job.exit(1, KILLED)
    access = [assignment.servers for assignment in job.started.values()]
    assert [each.worker for each in access if each is not None] == ["0", "1", "2"]
    assert {(each.address, each.token) for each in access if each is not None} == {(("127.0.0.1", 1), b"t")}
    assert all(assignment.placement.workers == 1 for assignment in job.started.values())


def test_a_finished_job_has_the_digest_of_its_servers(job: FakeJob) -> None:
    job.steps(0, 0.5)
    job.steps(1, 0.25)
    job.train(2, 8)
    job.finish(0)
    assert job.leader.phase is JobPhase.ENDING
    job.finish(1)
    assert job.leader.outcome is None
    (done,) = job.servers.digesting
    done("d1")
    found = outcome(job)
    assert (found.digest, found.steps, found.samples, found.exit_code) == ("d1", 2, 8, 0)
    assert (found.losses, found.servers, found.exit_codes) == ((0.5, 0.25), 2, (0, 0))
    assert found.events == ()
    assert job.servers.lost == []


def test_batches_are_numbered_in_the_order_of_arrival(job: FakeJob) -> None:
    job.steps(1, 1.0, 2.0)
    job.steps(0, 3.0)
    numbers = [
        [step.step for step in message.steps]
        for message in job.seen.heard_of
        if isinstance(message, StepReports)
    ]
    assert numbers == [[1, 2], [3]]


def test_a_resumed_job_counts_from_its_checkpoint(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, workers=1)
    job.servers.progress = ServerProgress(updates=10, samples=40, epoch=1, opened=True)
    job.servers.resumed_from = "ckpt/servers-00000002.json"
    job.begin_training()
    job.train(15, 60)
    job.finish(0)
    job.servers.digesting[0]("d")
    found = outcome(job)
    assert (found.first_step, found.steps, found.samples) == (10, 15, 20)
    assert found.resumed_from == "ckpt/servers-00000002.json"
    assert [event.kind for event in found.events] == [EventKind.RESUME]


def test_a_worker_that_dies_is_replaced_with_an_event_and_its_evidence(job: FakeJob) -> None:
    job.train(3, 12)
    job.servers.held["1"] = ShardInHand(0, 8, 16)
    job.exit(1, KILLED)
    assert sorted(job.started) == [0, 1, 2]
    assert job.servers.lost == ["1"]
    (event,) = job.seen.events
    assert (event.kind, event.role, event.reason) == (
        EventKind.FAILURE,
        ProcessRole.WORKER,
        "worker 1 was killed by SIGKILL",
    )
    assert (event.from_workers, event.to_workers, event.step) == (2, 1, 3)
    assert event.evidence == ("it held the shard of samples 8 to 15 of epoch 0",)


def test_a_poison_shard_ends_the_job_and_is_named(job: FakeJob) -> None:
    job.train(3, 12)
    for member, updates in ((0, 4), (1, 5), (2, 6)):
        job.servers.held[str(member)] = ShardInHand(0, 8, 16)
        job.exit(member, KILLED)
        job.train(updates, 4 * updates)
    job.exit(3, -signal.SIGTERM)
    found = outcome(job)
    assert found.failure is not None
    assert found.failure.cause is FailureCause.POISON
    assert "shard of samples 8 to 15 of epoch 0" in str(found.failure)
    assert found.exit_code == 137
    assert found.digest is None


def test_a_script_that_raises_gives_its_exit_code_and_traceback(job: FakeJob) -> None:
    job.hear(0, Failed(FailureKind.SCRIPT, "ValueError: bad", "Traceback: bad"))
    job.exit(0, 1)
    assert (1, signal.SIGTERM) in job.signals
    job.exit(1, 0)
    found = outcome(job)
    assert found.failure is not None
    assert (found.exit_code, found.failure.traceback) == (1, "Traceback: bad")


def test_a_script_without_servers_is_refused(job: FakeJob) -> None:
    job.servers.progress = ServerProgress(opened=False)
    job.finish(0)
    job.finish(1)
    found = outcome(job)
    assert found.exit_code == 2
    assert "never called gyrostat.servers(job)" in str(found.failure)


def test_servers_that_cannot_go_on_end_the_job(job: FakeJob) -> None:
    job.servers.failure = "server-1/0 cannot be started: ended with code 1, 3 times in a row"
    job.leader.tick()
    for member in (0, 1):
        job.exit(member, KILLED)
    found = outcome(job)
    assert str(found.failure) == "server-1/0 cannot be started: ended with code 1, 3 times in a row"
    assert found.exit_code == 1


def test_servers_that_are_lost_again_and_again_without_an_update_end_the_job(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, workers=1, failures={"restarts": 0})
    job.begin_training()
    lost = ServersHappened(kind=EventKind.FAILURE, reason="server server-1/0 was lost: killed")
    for update in range(1, 10):
        job.leader.from_servers(lost)
        job.train(update, update)
    for _ in range(3):
        job.leader.from_servers(lost)
    job.leader.tick()
    assert job.signals == []
    job.leader.from_servers(lost)
    job.leader.tick()
    assert job.signals == [(0, signal.SIGTERM)]
    job.leave(0)
    found = outcome(job)
    assert str(found.failure) == (
        "server server-1/0 was lost: killed; 4 losses of servers in a row without an update"
    )
    assert found.exit_code == 1


def test_status_knows_both_roles(job: FakeJob) -> None:
    job.train(5, 20)
    (status,) = job.ask(AskStatus()).replies
    assert isinstance(status, Status)
    assert (status.step, status.workers, status.members) == (5, 2, (0, 1))
    assert status.servers is not None
    assert [server.name for server in status.servers] == ["server-0", "server-1"]
    assert status.is_steady


def test_a_client_can_wait_for_the_first_update(job: FakeJob) -> None:
    client = job.ask(AskStatus(after_a_step=True))
    assert client.replies == []
    job.train(1, 4)
    assert len(client.replies) == 1


def test_scaling_both_roles_is_answered_when_both_are_in_place(job: FakeJob) -> None:
    client = job.ask(ScaleRoles("r", workers=3, servers=4))
    ((servers, done),) = job.servers.scaling
    assert (servers, sorted(job.started)) == (4, [0, 1, 2])
    assert client.replies == []
    done(None)
    job.leader.tick()
    assert client.replies == []
    job.begin_training()
    answer = result(client)
    assert (answer.done, answer.workers, answer.text) == (True, 3, "3 workers and 4 servers since update 0")
    assert job.leader.servers == 4
    assert [(event.kind, event.from_workers, event.to_workers) for event in job.seen.events] == [
        (EventKind.RESIZE, 2, 3)
    ]


def test_a_request_is_carried_out_once_and_answered_twice(job: FakeJob) -> None:
    first = job.ask(Scale("r", 3))
    second = job.ask(Scale("r", 3))
    job.begin_training()
    third = job.ask(Scale("r", 3))
    assert result(first) == result(second) == result(third)
    assert sorted(job.started) == [0, 1, 2]


def test_a_second_change_is_refused_for_now(job: FakeJob) -> None:
    job.ask(Scale("a", 3))
    answer = result(job.ask(Scale("b", 1)))
    assert (answer.done, answer.retryable) == (False, True)


def test_servers_that_cannot_be_scaled_say_why(job: FakeJob) -> None:
    client = job.ask(ScaleRoles("r", servers=5))
    job.servers.scaling[0][1]("no memory")
    assert result(client).text == "no memory"
    assert job.leader.busy is None


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (ScaleRoles("r", servers=0), "the job can have 1 to 1024 servers, and would have 0"),
        (ScaleRoles("r", servers=-2, relative=True), "the job can have 1 to 1024 servers, and would have 0"),
        (
            ScaleRoles("r", workers=-3, relative=True),
            "the job can have 0 to 65536 workers, and would have -1",
        ),
        (Scale("r", -1), "the job can have 0 to 65536 workers, and would have -1"),
        (ScaleBy("r", -1, (7,)), "the job has no worker 7; it has 0, 1"),
        (Migrate("r", (9,)), "the job has no worker 9; it has 0, 1"),
        (
            ProfileJob("r"),
            "a job with parameter servers is not profiled; `gyrostat status` shows its throughput",
        ),
    ],
)
def test_bad_requests_are_refused_with_the_reason(
    job: FakeJob, request_: ScaleRoles | Scale | ScaleBy | Migrate | ProfileJob, text: str
) -> None:
    answer = result(job.ask(request_))
    assert (answer.done, answer.invalid, answer.text) == (False, True, text)
    assert sorted(job.started) == [0, 1]
    assert job.signals == []


def test_named_workers_are_migrated(job: FakeJob) -> None:
    client = job.ask(Migrate("r", (0,)))
    assert job.signals == [(0, signal.SIGTERM)]
    job.begin_training()
    assert client.replies == []
    job.leave(0)
    assert result(client).done
    assert job.leader.members == (1, 2)


def test_no_workers_and_then_some(job: FakeJob) -> None:
    client = job.ask(Scale("zero", 0))
    for member in (0, 1):
        job.leave(member)
    assert result(client).done
    assert job.leader.outcome is None
    again = job.ask(Scale("two", 2))
    assert sorted(job.started) == [0, 1, 2, 3]
    job.hear(2, job.seen.heard_of[0])
    job.hear(3, job.seen.heard_of[0])
    job.leader.tick()
    assert result(again).done


def test_a_stop_without_checkpoints_is_refused_and_a_signal_ends_the_job(job: FakeJob) -> None:
    for request in (AskStop(), AskCheckpoint()):
        assert "without --checkpoint-dir" in result(job.ask(request)).text
    job.leader.signalled(signal.SIGINT)
    job.leader.tick()
    assert job.signals == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    for member in (0, 1):
        job.leave(member)
    found = outcome(job)
    assert (found.exit_code, found.stopped_by) == (130, signal.SIGINT)
    assert job.servers.saving == []


def test_a_stop_ends_workers_first_and_then_checkpoints(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, checkpoints=True)
    job.begin_training()
    job.train(4, 16)
    assert result(job.ask(AskStop())).done
    for member in (0, 1):
        job.leave(member)
    assert job.leader.outcome is None
    (done,) = job.servers.saving
    job.leader.from_servers(ServersCheckpointed(path="ckpt/servers-00000001.json", seconds=0.5))
    done(None)
    found = outcome(job)
    assert (found.exit_code, found.stop_requested, found.stopped) == (143, True, True)
    assert [checkpoint.path for checkpoint in found.checkpoints] == ["ckpt/servers-00000001.json"]
    assert [event.kind for event in found.events] == [EventKind.CHECKPOINT, EventKind.STOP]


def test_a_second_signal_kills_without_a_checkpoint(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, checkpoints=True)
    job.begin_training()
    job.train(4, 16)
    job.leader.signalled(signal.SIGINT)
    job.leader.tick()
    job.leader.signalled(signal.SIGINT)
    job.leader.tick()
    assert job.signals[2:] == [(0, signal.SIGKILL), (1, signal.SIGKILL)]
    for member in (0, 1):
        job.exit(member, KILLED)
    assert outcome(job).exit_code == 130
    assert job.servers.saving == []


def test_a_checkpoint_that_fails_is_an_event(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, checkpoints=True)
    job.begin_training()
    assert result(job.ask(AskCheckpoint())).done
    job.servers.saving[0]("the disk is full")
    assert [(event.kind, event.reason) for event in job.seen.events] == [
        (EventKind.CHECKPOINT_FAILED, "the disk is full")
    ]


def test_events_of_servers_reach_the_outcome(job: FakeJob) -> None:
    lost = ServersHappened(kind=EventKind.FAILURE, reason="server server-1 was lost: killed", evidence=("e",))
    job.leader.from_servers(lost)
    job.finish(0)
    job.finish(1)
    job.servers.digesting[0]("d")
    (event,) = outcome(job).events
    assert (event.role, event.reason, event.evidence) == (
        ProcessRole.SERVER,
        "server server-1 was lost: killed",
        ("e",),
    )
    assert event.as_json()["role"] == "server"


def test_a_schedule_follows_the_updates(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, workers=1, schedule=((5, 3),))
    job.begin_training()
    job.train(4, 16)
    assert sorted(job.started) == [0]
    job.train(6, 24)
    assert sorted(job.started) == [0, 1, 2]


def test_devices_are_occupied_left_and_vacated(tmp_path: Path) -> None:
    slots = tuple(Slot(device=device, env={"D": str(device)}) for device in range(4))
    job = FakeJob(tmp_path, device_assignment=DeviceAssignment(slots[:2]))
    job.begin_training()
    client = job.ask(Occupy("r", (slots[1], slots[3])))
    assert job.signals == [(0, signal.SIGTERM)]
    job.begin_training()
    job.leave(0)
    assert result(client).done
    (status,) = job.ask(AskStatus()).replies
    assert isinstance(status, Status)
    assert status.devices == (1, 3)
    job.ask(Vacate((3,)))
    assert job.signals[-1] == (2, signal.SIGKILL)
    job.exit(2, KILLED)
    assert sorted(job.started) == [0, 1, 2]
    assert job.leader.members == (1,)


def test_a_silent_worker_is_killed_and_replaced(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, workers=1, failures={"heartbeat_timeout_s": 0.02})
    job.begin_training()
    job.train(1, 4)
    while not job.signals:
        job.leader.tick()
    assert job.pinged
    assert job.signals == [(0, signal.SIGKILL)]
    job.exit(0, KILLED)
    assert sorted(job.started) == [0, 1]
    assert job.seen.events[-1].reason == "worker 0 was lost: silent for 0.02 s"
