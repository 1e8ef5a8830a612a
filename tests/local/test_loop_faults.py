"""No job ends the scheduling loop: one that the daemon or its policy cannot handle is set aside with its error."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import JobState
from gyrostat.cluster.registry import Registry
from gyrostat.core.errors import GyrostatError
from gyrostat.core.phase import JobPhase
from gyrostat.core.request import JobId
from gyrostat.job.control.requests import AskStop
from gyrostat.local.cluster import LocalCluster
from gyrostat.local.controller import JobController
from gyrostat.local.daemon import Daemon
from gyrostat.local.home import Home
from gyrostat.local.inbox import ClusterInbox
from gyrostat.local.layout import layout_of_slots
from gyrostat.local.store import Store
from gyrostat.sched.faults import jobs_at_fault
from gyrostat.sched.policies.fairshare import FairShare
from gyrostat.sched.port import Submitted
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.views import JobView
from tests.local.clusters import until
from tests.local.fake_job import FakeJob, job_status

POISON = 13
LAYOUT = layout_of_slots("cpu:2")


def job(directory: Path, **fields: Any) -> JobSpec:
    (directory / "x.py").touch()
    return JobSpec(script="x.py", workdir=str(directory), **fields)


@contextlib.contextmanager
def stored(home: Home) -> Iterator[Registry]:
    """What an earlier daemon left."""
    home.make()
    store = Store(home.database)
    yield Registry(store)
    store.close()


def add_running(registry: Registry, spec: JobSpec, device: int) -> None:
    record = registry.add(spec, "me", "default")
    registry.move(record.id, JobState.STARTING, "started", devices=(device,), attempts=1)
    registry.move(record.id, JobState.RUNNING, "running")


def fails(daemon: Daemon, id_: str) -> str:
    until(daemon, lambda: daemon.service.job(id_, None).state.over, "is set aside")
    record = daemon.service.job(id_, None)
    assert record.state is JobState.FAILED
    return record.reason


@pytest.mark.parametrize(
    "fields",
    [
        {"time_limit": 1e300},
        {"time_limit": 1e11},
        {"checkpoint_every": 10**30},
        {"virtual_workers": 10**9},
        {"args": ("x" * 100_000,)},
    ],
    ids=str,
)
def test_values_that_an_older_version_accepted(tmp_path: Path, fields: dict[str, Any]) -> None:
    """One waits, one trains. Both are set aside; the third job is started."""
    home = Home(tmp_path / "state")
    with stored(home) as registry:
        add_running(registry, job(tmp_path, **fields), 0)
        registry.add(job(tmp_path, **fields), "me", "default")
        registry.add(job(tmp_path), "me", "default")
    (name,) = fields
    with (
        FakeJob("j1", home.job("j1"), home.sockets) as fake,
        Daemon(home, LAYOUT, "wfs", spare=0) as daemon,
    ):
        assert f"$.spec.{name}" in fails(daemon, "j2")
        until(daemon, lambda: bool(daemon.service.job("j3", None).devices), "is started")
        assert isinstance(fake.requests.get(timeout=120.0), AskStop)
        daemon.service.shutdown(checkpoint=False)
    with stored(home) as registry:
        found = registry.get("j1")
        assert found.state is JobState.RUNNING
        assert found.defect is not None


def poisoned(raises: Callable[[JobView], bool]) -> Callable[[FairShare, JobView, float], Any]:
    rank = FairShare.rank

    def poisoned_rank(self: FairShare, view: JobView, now: float) -> Any:
        if raises(view):
            raise ZeroDivisionError("poison")
        return rank(self, view, now)

    return poisoned_rank


@pytest.mark.parametrize(
    "raises",
    [
        lambda view: view.request.priority == POISON,
        lambda view: view.request.priority == POISON and view.running,
    ],
    ids=["when it is submitted", "when it is placed"],
)
def test_a_policy_that_fails_on_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Callable[[JobView], bool]
) -> None:
    monkeypatch.setattr(FairShare, "rank", poisoned(raises))
    home = Home(tmp_path / "state")
    with stored(home) as registry:
        add_running(registry, job(tmp_path), 0)
    with (
        FakeJob("j1", home.job("j1"), home.sockets) as fake,
        Daemon(home, LAYOUT, "wfs", spare=0) as daemon,
    ):
        fake.status = job_status(JobPhase.TRAINING, (0,))
        until(daemon, lambda: daemon.service.job("j1", None).workers == 1, "is adopted")
        bad = daemon.service.submit(job(tmp_path, priority=POISON), "me")
        assert fails(daemon, bad.id) == "the scheduler failed on it: ZeroDivisionError('poison')"
        good = daemon.service.submit(job(tmp_path), "me")
        until(daemon, lambda: daemon.service.job(good.id, None).devices == (1,), "is started")
        trains = daemon.service.job("j1", None)
        assert (trains.state, trains.devices) == (JobState.RUNNING, (0,))
        assert fake.requests.empty()
        daemon.service.shutdown(checkpoint=False)


@pytest.mark.parametrize("function", ["owner_changed", "_submit", "_assign", "_check_time"])
def test_a_controller_that_fails_on_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    works = getattr(JobController, function)

    def poisoned_function(self: JobController, first: Any, *rest: Any, **fields: Any) -> Any:
        if (first if isinstance(first, str) else first.id) == "j1":
            raise OverflowError("poison")
        return works(self, first, *rest, **fields)

    monkeypatch.setattr(JobController, function, poisoned_function)
    with Daemon(Home(tmp_path / "state"), LAYOUT, "wfs", spare=0) as daemon:
        daemon.service.submit(job(tmp_path, time_limit=1000.0), "me")
        assert fails(daemon, "j1") == "the scheduler failed on it: OverflowError('poison')"
        good = daemon.service.submit(job(tmp_path), "me")
        until(daemon, lambda: bool(daemon.service.job(good.id, None).devices), "is started")
        daemon.service.shutdown(checkpoint=False)


def test_a_scheduler_that_always_fails_ends_the_daemon_and_jobs_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "state")
    with stored(home) as registry:
        add_running(registry, job(tmp_path), 0)
    with FakeJob("j1", home.job("j1"), home.sockets) as fake:
        fake.status = job_status(JobPhase.TRAINING, (0,))

        def broken(self: LocalCluster, until: float | None) -> None:
            raise ZeroDivisionError("broken")

        with monkeypatch.context() as patched:
            patched.setattr(LocalCluster, "wait", broken)
            with (
                pytest.raises(
                    GyrostatError, match=r"the scheduling loop failed: ZeroDivisionError.*jobs train on"
                ),
                Daemon(home, LAYOUT, "wfs", spare=0) as daemon,
            ):
                daemon.wait(120.0)
        with Daemon(home, LAYOUT, "wfs", spare=0) as daemon:
            until(daemon, lambda: daemon.service.job("j1", None).workers == 1, "is adopted")
            found = daemon.service.job("j1", None)
            assert (found.state, found.devices, found.attempts) == (JobState.RUNNING, (0,), 1)
            daemon.service.shutdown(checkpoint=False)
        assert fake.requests.empty()


@pytest.mark.parametrize("seconds", [1e300, 1e11, math.inf, math.nan])
def test_the_loop_waits_for_any_time(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, waited = ClusterInbox(), list[float]()
    monkeypatch.setattr(inbox._changed, "wait_for", lambda reached, timeout: waited.append(timeout))
    inbox.wait(seconds)
    assert waited == [3600.0]


def test_the_jobs_at_fault_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairShare, "rank", poisoned(lambda view: view.request.priority == POISON))
    bad = {3, 4, 11}
    jobs = {
        JobId(f"j{number}"): (
            Submitted(
                LAYOUT.request(
                    f"j{number}", JobSpec(script="x", priority=POISON if number in bad else 0), "default", 0.0
                )
            ),
        )
        for number in range(12)
    }

    def build() -> SchedulerState:
        return LAYOUT.scheduler_state("wfs")

    found = jobs_at_fault(build, jobs, 5.0)
    assert {name: repr(error) for name, error in found.items()} == {
        f"j{number}": "ZeroDivisionError('poison')" for number in bad
    }
    assert jobs_at_fault(build, {}, 5.0) == {}


def test_no_job_is_at_fault_for_a_policy_that_always_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(self: FairShare, vc: object, now: float) -> Any:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(FairShare, "decide", decide)
    request = LAYOUT.request("j1", JobSpec(script="x"), "default", 0.0)
    with pytest.raises(ZeroDivisionError, match="broken"):
        jobs_at_fault(lambda: LAYOUT.scheduler_state("wfs"), {request.id: (Submitted(request),)}, 5.0)
