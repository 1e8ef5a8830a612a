"""One move leads from where a job is to where it should be, and moves end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.cluster.next_move import DriverMove, next_move
from gyrostat.cluster.occupancy import Occupancy
from gyrostat.cluster.records import JobSpec
from gyrostat.core.phase import JobPhase, ReconfigurationPhase
from gyrostat.job.control.control_socket import Request, RequestResult, Status
from gyrostat.job.processes.protocol import Channel
from gyrostat.job.processes.unix_socket import bind_at
from gyrostat.local import driver as module
from gyrostat.local.driver import AttemptBegan, Driver, DriverTrouble, HostGone, News, StatusSeen
from gyrostat.local.host_pool import HostPool
from gyrostat.local.layout import layout_of_slots
from tests.local.fork_servers import Hatchery

Devices = tuple[int, ...]


@pytest.mark.parametrize(
    ("wanted", "actual", "hosted", "can_join", "move"),
    [
        ((), (), False, True, DriverMove.NOTHING),
        ((0, 1), (), False, True, DriverMove.START),
        ((0, 1), (), False, False, DriverMove.NOTHING),
        ((), (0, 1), True, True, DriverMove.STOP),
        ((0, 1), (0, 1), True, True, DriverMove.NOTHING),
        ((0,), (0, 1), True, True, DriverMove.OCCUPY),
        ((0, 2), (0, 1), True, True, DriverMove.OCCUPY),
        ((0, 2), (0, 1), True, False, DriverMove.LEAVE),
        ((0, 1, 2), (0, 1), True, False, DriverMove.NOTHING),
        ((2, 3), (0, 1), True, False, DriverMove.STOP),
    ],
)
def test_moves(wanted: Devices, actual: Devices, hosted: bool, can_join: bool, move: DriverMove) -> None:
    assert next_move(wanted=wanted, actual=actual, hosted=hosted, can_join=can_join) is move


sets = st.sets(st.integers(0, 5)).map(lambda devices: tuple(sorted(devices)))


@given(st.lists(st.tuples(sets, sets), min_size=1, max_size=5))
def test_everybody_gets_there_whatever_they_had(had_and_wanted: list[tuple[Devices, Devices]]) -> None:
    """Entitlements never overlap, as a scheduler sees to; what jobs had did not either. Swaps are no deadlock."""
    actual: dict[str, Devices] = {}
    wanted: dict[str, Devices] = {}
    for number, (had, wants) in enumerate(had_and_wanted):
        taken = {device for devices in actual.values() for device in devices}
        promised = {device for devices in wanted.values() for device in devices}
        actual[f"j{number}"] = tuple(device for device in had if device not in taken)
        wanted[f"j{number}"] = tuple(device for device in wants if device not in promised)
    occupancy = Occupancy()
    for job, devices in actual.items():
        occupancy.found(job, devices)
    for job, devices in wanted.items():
        occupancy.entitle(job, devices)
    for _ in range(3 * len(actual)):
        for job in actual:
            _step(job, actual, wanted, occupancy)
            for device in range(6):
                assert len(occupancy.on(device)) <= 1, f"two jobs on {device}"
    assert actual == wanted


def _step(job: str, actual: dict[str, Devices], wanted: dict[str, Devices], occupancy: Occupancy) -> None:
    joining = [device for device in wanted[job] if device not in actual[job]]
    move = next_move(
        wanted=wanted[job],
        actual=actual[job],
        hosted=bool(actual[job]),
        can_join=occupancy.sit(job, joining),
    )
    match move:
        case DriverMove.START | DriverMove.OCCUPY:
            actual[job] = wanted[job]
        case DriverMove.STOP:
            actual[job] = ()
        case DriverMove.LEAVE:
            actual[job] = tuple(device for device in actual[job] if device in wanted[job])
        case DriverMove.NOTHING:
            return
    occupancy.leave(job, keep=actual[job])


def test_who_shares_a_device_waits_for_nobody() -> None:
    occupancy = Occupancy()
    occupancy.entitle("host", (0, 1))
    assert occupancy.sit("host", (0, 1))
    occupancy.entitle("guest", (0, 1))
    assert occupancy.sit("guest", (0, 1))
    occupancy.entitle("host", ())
    assert not occupancy.sit("third", (1,))
    assert not occupancy.await_free((1,), 0.0)
    occupancy.leave("host")
    occupancy.leave("guest")
    assert occupancy.await_free((0, 1), 0.0)


def driver_in(
    directory: Path, pool: HostPool, tell: Callable[[News], None], occupancy: Occupancy | None = None
) -> Driver:
    return Driver(
        "j1",
        directory / "job",
        directory / "run",
        spec=lambda: JobSpec(script="x.py"),
        attempt=0,
        slot=layout_of_slots("cpu:1").slot,
        occupancy=Occupancy() if occupancy is None else occupancy,
        pool=pool,
        tell=tell,
    )


def test_trouble_is_told_once_and_it_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError("too many open files")] * 3

    def is_hosted(directory: Path) -> bool:
        if failures:
            raise failures.pop()
        return False

    monkeypatch.setattr(module, "is_hosted", is_hosted)
    monkeypatch.setattr(module, "_TROUBLED_S", 0.001)
    news: SimpleQueue[News] = SimpleQueue()
    driver = driver_in(tmp_path, HostPool(tmp_path / "log", spare=0), news.put)
    driver.adopt()
    driver.start()
    told = news.get(timeout=120.0)
    assert isinstance(told, DriverTrouble)
    assert "too many open files" in told.reason
    assert news.get(timeout=120.0) == HostGone("j1", 0, None)
    assert not driver.hosted
    driver.close()


def test_a_job_that_no_host_has_taken_can_be_stopped(tmp_path: Path) -> None:
    never_ready = Hatchery(tmp_path, "exec cat > /dev/null")
    news: SimpleQueue[News] = SimpleQueue()
    pool = HostPool(tmp_path / "log", spare=0, source=never_ready)
    driver = driver_in(tmp_path, pool, news.put)
    driver.start()
    driver.aim((0,))
    assert news.get(timeout=120.0) == AttemptBegan("j1", 1)
    driver.aim((), within=600.0)
    ended = news.get(timeout=120.0)
    assert isinstance(ended, HostGone)
    assert ended.result is not None
    assert (ended.result.stopped, ended.result.reason) == (True, "called off before a host took it")
    assert not driver.hosted
    driver.close()
    pool.close()
    never_ready.bury()


def test_one_that_is_stopping_is_still_killed_if_it_should_go_on_elsewhere(tmp_path: Path) -> None:
    driver = driver_in(tmp_path, HostPool(tmp_path / "log", spare=0), lambda news: None)
    driver.aim((), within=600.0)
    driver._stopping = True
    driver.aim((0,))
    assert driver._kill_at is not None
    driver.close()


def test_who_is_too_busy_to_leave_for_long_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_in(tmp_path, HostPool(tmp_path / "log", spare=0), lambda news: None)
    busy = RequestResult(False, "busy with a profile; retry", 3, 2, retryable=True)
    monkeypatch.setattr(module, "_SHRINK_S", 0.0)
    driver._actual = (0, 1)
    driver._pending = ("grow", (0, 1, 2))
    driver._answered(busy)
    assert not driver._too_busy_to_leave((0, 1, 2))
    assert not driver._too_busy_to_leave((0,)), "it has not been asked to leave yet"
    driver._pending = ("shrink", (0,))
    driver._answered(busy)
    assert driver._too_busy_to_leave((0,))
    driver._pending = ("shrink", (0,))
    driver._answered(RequestResult(True, "moved", 4, 1, 1.0, 1.0))
    assert not driver._too_busy_to_leave((0,))
    driver.close()


def test_a_job_that_does_not_train_keeps_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its workers are restarted, or before nodes have come, a job has none; the devices are its own all the same."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "is_hosted", lambda directory: True)
    seen: SimpleQueue[tuple[JobPhase, list[str]]] = SimpleQueue()
    occupancy = Occupancy()

    def hear(news: News) -> None:
        if isinstance(news, StatusSeen):
            seen.put((news.status.phase, occupancy.on(0)))

    with StatusServer(tmp_path / "run" / "gyrostat" / "j1.socket") as job:
        job.status = job_status(JobPhase.TRAINING, devices=(0,))
        driver = driver_in(tmp_path, HostPool(tmp_path / "log", spare=0), hear, occupancy)
        with contextlib.closing(driver):
            driver.adopt()
            driver.aim((0,))
            driver.start()
            for phase in (JobPhase.RESTARTING, JobPhase.WAITING_FOR_NODES, JobPhase.SUSPENDED):
                job.status = job_status(phase, devices=())
                while (last := seen.get(timeout=120.0))[0] is not phase:
                    pass
                assert last == (phase, ["j1"])


def job_status(phase: JobPhase, devices: Devices) -> Status:
    return Status(
        name="j1",
        program="x.py",
        pid=1,
        virtual_workers=1,
        workers=len(devices),
        members=tuple(range(len(devices))),
        generation=1,
        phase=phase,
        reconfiguration=ReconfigurationPhase.STEADY,
        step=3,
        loss=None,
        throughput=None,
        devices=devices,
    )


class StatusServer:
    """A job's control socket that answers every request with `status`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True)
        self.status: Status
        self._listener = bind_at(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                channel: Channel[Request] = Channel(self._listener.accept()[0], Request)
                while (requests := channel.receive()) is not None:
                    for _ in requests:
                        channel.send(self.status)
                channel.close()

    def __enter__(self) -> StatusServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
