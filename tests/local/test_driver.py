"""A driver brings its job to the devices it should have; tested against a job that only answers on its control socket."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import pytest

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.occupancy import Occupancy
from gyrostat.core.phase import JobPhase, transition
from gyrostat.job.control.requests import AskStop, Occupy, RequestResult
from gyrostat.local.driver import Driver
from gyrostat.local.driver_messages import (
    DriverMessage,
    DriverTrouble,
    HostGone,
    JobBlocked,
    JobMoved,
    MoveFailed,
    StatusSeen,
)
from gyrostat.local.driver_phase import DRIVER_TRANSITIONS, DriverPhase
from gyrostat.local.host_pool import HostPool
from gyrostat.local.layout import layout_of_slots
from gyrostat.local.move_retries import MoveRetries
from tests.local.fake_job import FakeJob, job_status
from tests.local.fork_servers import FakeForkServer

TIMEOUT_S = 120.0
T = TypeVar("T")


@dataclass
class Driven:
    """A driver, and what it reports."""

    driver: Driver
    occupancy: Occupancy
    messages: SimpleQueue[DriverMessage]
    attempts: SimpleQueue[int]
    """That were begun."""

    def next(self, kind: type[T]) -> T:
        """The next message of this kind."""
        while not isinstance(message := self.messages.get(timeout=TIMEOUT_S), kind):
            pass
        return message

    def await_phase(self, phase: JobPhase) -> None:
        """Until the driver has handled a status with this phase."""
        while self.next(StatusSeen).status.phase is not phase:
            pass


@contextlib.contextmanager
def driving(directory: Path, pool: HostPool | None = None) -> Iterator[Driven]:
    messages: SimpleQueue[DriverMessage] = SimpleQueue()
    attempts: SimpleQueue[int] = SimpleQueue()
    occupancy = Occupancy()
    driver = Driver(
        "j1",
        directory / "job",
        directory / "run",
        spec=lambda: JobSpec(script="x.py"),
        attempt=0,
        slot=layout_of_slots("cpu:4").slot,
        occupancy=occupancy,
        pool=pool or HostPool(directory / "log", spare=0),
        begin=attempts.put,
        post=messages.put,
    )
    with contextlib.closing(driver):
        yield Driven(driver, occupancy, messages, attempts)


@contextlib.contextmanager
def fake_job(directory: Path) -> Iterator[FakeJob]:
    with FakeJob("j1", directory / "job", directory / "run") as job:
        yield job


def train(driven: Driven, job: FakeJob, devices: tuple[int, ...]) -> None:
    """The driver adopts a job that trains on these, and should."""
    job.status = job_status(JobPhase.TRAINING, devices)
    driven.driver.adopt()
    driven.driver.retarget(devices)
    driven.driver.start()
    driven.await_phase(JobPhase.TRAINING)


def test_every_phase_has_its_transitions_and_only_ended_hosts_end() -> None:
    assert DRIVER_TRANSITIONS.keys() == set(DriverPhase)
    for phase in DriverPhase:
        assert (DriverPhase.ENDED in DRIVER_TRANSITIONS[phase]) == phase.hosted
    with pytest.raises(RuntimeError, match="DriverPhase: TRAINING may not follow STOPPING"):
        transition(DriverPhase.STOPPING, DriverPhase.TRAINING, DRIVER_TRANSITIONS)


def test_a_failure_is_reported_once_and_the_driver_tries_again(tmp_path: Path) -> None:
    lock = tmp_path / "job" / "host.lock"
    lock.mkdir(parents=True)  # reading it fails
    with driving(tmp_path) as driven:
        driven.driver.adopt()
        driven.driver.start()
        assert "IsADirectoryError" in driven.next(DriverTrouble).reason
        lock.rmdir()
        assert driven.messages.get(timeout=TIMEOUT_S) == HostGone("j1", 0, None)
        assert not driven.driver.hosted


def test_a_job_that_no_host_has_taken_can_be_stopped(tmp_path: Path) -> None:
    never_ready = FakeForkServer(tmp_path, "exec cat > /dev/null")
    pool = HostPool(tmp_path / "log", spare=0, source=never_ready)
    with driving(tmp_path, pool) as driven:
        driven.driver.start()
        driven.driver.retarget((0,))
        assert driven.attempts.get(timeout=TIMEOUT_S) == 1
        driven.driver.retarget((), within=600.0)
        result = driven.next(HostGone).result
        assert result is not None
        assert (result.stopped, result.reason) == (True, "cancelled before a host took it")
        driven.driver.retarget((1,), restart=True)
        assert driven.attempts.get(timeout=TIMEOUT_S) == 2
        assert (driven.occupancy.on(0), driven.occupancy.on(1)) == ([], ["j1"])
    pool.close()
    never_ready.wait()


def test_a_job_whose_target_is_empty_before_it_starts_is_reported_each_time(tmp_path: Path) -> None:
    with driving(tmp_path) as driven:
        driven.occupancy.mark("other", (0,))
        driven.driver.start()
        for _ in range(2):
            driven.driver.retarget((0,))
            driven.driver.retarget((), within=600.0)
            message = driven.messages.get(timeout=TIMEOUT_S)
            while isinstance(message, JobBlocked):  # its thread has looked between the two targets
                message = driven.messages.get(timeout=TIMEOUT_S)
            assert message == HostGone("j1", 0, None, began=False)
        assert driven.attempts.empty()


def test_a_job_moves_and_a_refused_move_is_reported(tmp_path: Path) -> None:
    with fake_job(tmp_path) as job, driving(tmp_path) as driven:
        train(driven, job, (0, 1))
        driven.driver.retarget((1, 2))
        request = job.requests.get(timeout=TIMEOUT_S)
        assert isinstance(request, Occupy)
        assert [slot.device for slot in request.slots] == [1, 2]
        assert driven.next(JobMoved).after == (1, 2)
        assert (driven.occupancy.on(0), driven.occupancy.on(2)) == ([], ["j1"])
        job.result = RequestResult(False, "no such device")
        driven.driver.retarget((1, 2, 3))
        assert driven.next(MoveFailed).reason == "no such device"
        assert driven.driver.actual == (1, 2)


def test_a_job_that_is_not_where_it_reports_to_be_is_reported_once_and_not_moved_again_and_again(
    tmp_path: Path,
) -> None:
    with fake_job(tmp_path) as job, driving(tmp_path) as driven:
        train(driven, job, (0, 1))
        job.lies = (0, 0)
        driven.driver.retarget((0, 1, 2))
        assert driven.next(JobMoved).after == (0, 1, 2)
        trouble = driven.next(DriverTrouble).reason
        assert trouble == "its workers are on devices 0, 0, and it reported that they are on 0, 1, 2", (
            "compared with its status"
        )
        assert driven.next(JobMoved).after == (0, 1, 2), "it is tried again"
        again = time.monotonic()
        job.lies = None
        assert driven.next(JobMoved).after == (0, 1, 2)
        assert time.monotonic() - again > 1.0, "after a pause"


def test_a_job_that_does_not_train_keeps_its_devices(tmp_path: Path) -> None:
    """A job that restarts, or waits for nodes, has no workers; its devices are its own all the same."""
    with fake_job(tmp_path) as job, driving(tmp_path) as driven:
        train(driven, job, (0,))
        for phase in (JobPhase.RESTARTING, JobPhase.WAITING_FOR_NODES, JobPhase.SUSPENDED):
            job.status = job_status(phase)
            driven.await_phase(phase)
            assert driven.driver.actual == (0,)
            assert not driven.occupancy.acquire("other", (0,))


def test_a_job_that_stops_is_still_killed_if_it_should_run_elsewhere_meanwhile(tmp_path: Path) -> None:
    """It was asked to stop, and does not."""
    host = (
        "import sys, pathlib, os; from gyrostat.local.host_files import register_host; "
        "register_host(pathlib.Path(sys.argv[1]), 1, os.getpid()); print('ready', flush=True); input()"
    )
    command = [sys.executable, "-c", host, str(tmp_path / "job")]
    with fake_job(tmp_path) as job, driving(tmp_path) as driven:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            train(driven, job, (0,))
            driven.driver.retarget((), within=1.0)
            assert isinstance(job.requests.get(timeout=TIMEOUT_S), AskStop)
            driven.driver.retarget((1,))
            assert process.wait(TIMEOUT_S) == -9


def test_when_moves_are_tried_again() -> None:
    retries = MoveRetries()
    retries.busy(10.0)
    assert retries.pause(10.0) == pytest.approx(0.1)
    pauses, reports, now = [], [], 10.1
    for _ in range(7):
        reports.append(retries.busy(now))
        pauses.append(retries.pause(now))
        now += pauses[-1]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])
    assert reports == [False] * 5 + [True, False], "reported once"
    for now, pause in ((20.0, 2.0), (30.0, 4.0), (40.0, 8.0), (50.0, 16.0), (60.0, 30.0), (99.0, 30.0)):
        retries.refused(now)
        assert retries.pause(now) == pause
    retries.moved((3,), 99.0)
    assert retries.check((3,)) is None
    for now, pause in (
        (200.0, 0.0),
        (201.0, 2.0),
        (203.0, 4.0),
    ):  # the same move, and its status shows other devices
        retries.moved((0, 1), now)
        assert retries.pause(now) == pause
        wrong = "its workers are on devices 0, 0, and it reported that they are on 0, 1"
        assert retries.check((0, 0)) == (wrong if now == 200.0 else None), "reported once"
    assert retries.check((1, 0)) is None
    assert retries.reported is None
