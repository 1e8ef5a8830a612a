"""The daemon is killed at every step of a submission, a resize and a completion, again and again, over the same jobs: no
accepted job is forgotten, none ends twice, all end with the bits of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gyrostat.cluster.attempt import AttemptResult
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.layout import read_layout
from gyrostat.cluster.records import Intent, JobState
from gyrostat.cluster.registry import Registry
from gyrostat.core.errors import UsageError
from gyrostat.core.phase import JobPhase
from gyrostat.local.cluster import LocalCluster
from gyrostat.local.daemon import Daemon
from gyrostat.local.home import Home
from gyrostat.local.host_files import CHECKPOINTS, read_host
from gyrostat.local.host_pool import HostPool
from gyrostat.local.layout import layout_of_slots
from gyrostat.local.store import Store
from gyrostat.sched.recording import replay
from tests.conftest import Launch
from tests.local.clusters import TIMEOUT_S, finished, fixed, running, spec, until, write_script
from tests.local.crashing import PAUSE_S, STEPS
from tests.local.fake_job import FakeJob, job_status

CHAIN = (
    ("submission, before it is written", "submit", "a"),
    ("submission, written", "submit", "a"),
    ("start, before it is written", "submit", "a"),
    ("start, written", "submit", "a"),
    ("start, before the order", "submit", "a"),
    ("start, ordered", "submit", "a"),
    ("start, given to a host", "submit", "a"),
    ("start, trains", "submit", "a"),
    ("resize, before it is written", "submit", "b"),
    ("resize, written", "submit", "c"),
    ("resize, asked", "submit", "d"),
    ("resize, answered", "finish", "b"),
    ("end, before it is reported", "finish", "c"),
    ("end, before it is written", "finish", "d"),
    ("end, written", "finish", "a"),
)
SHORT = (
    ("submission, written", "submit", "a"),
    ("start, ordered", "submit", "a"),
    ("resize, asked", "submit", "b"),
    ("end, before it is reported", "finish", "b"),
)


def crash(directory: Path, point: str, deed: str, name: str) -> None:
    """A daemon does this and dies at that point."""
    command = [sys.executable, "-m", "tests.local.crashing", str(directory), point, deed, name]
    process = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT_S)
    assert process.returncode == -signal.SIGKILL, f"{point}: {process.stdout}{process.stderr}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chain", [SHORT, pytest.param(CHAIN, marks=pytest.mark.full)], ids=["short", "all"])
def test_killed_at_every_step(
    launch: Launch, tmp_path: Path, chain: tuple[tuple[str, str, str], ...]
) -> None:
    write_script(tmp_path)
    for point, deed, name in chain:
        crash(tmp_path, point, deed, name)
    accepted = (tmp_path / "accepted").read_text().split()
    for name in "abcd":
        (tmp_path / f"hurry-{name}").touch()
    with running(tmp_path, "cpu:3") as daemon:  # a device is gone, too
        assert set(accepted) <= {job.name for job in daemon.service.jobs(None)}, (
            "an accepted job was forgotten"
        )
        records = finished(daemon, *(job.id for job in daemon.service.jobs(None)))
    assert {record.name for record in records} == {name for _, _, name in chain}
    assert [record.step for record in records] == [STEPS] * len(records)
    digests = {
        workers: fixed(launch, spec(tmp_path, STEPS, PAUSE_S, virtual_workers=workers)) for workers in (1, 4)
    }
    assert [record.digest for record in records] == [digests[job.spec.virtual_workers] for job in records]
    for recording in daemon.home.recording_files():
        assert (
            replay(
                recording, lambda setup: read_layout(setup["cluster"]).scheduler_state(setup["policy"])
            ).difference
            is None
        )
    for record in records:
        results = [
            msgspec.json.decode(path.read_bytes(), type=AttemptResult)
            for path in daemon.home.job(record.id).glob("result-*.json")
        ]
        assert sum(result.finished for result in results) == 1, f"{record.name} ended twice"


def test_a_killed_daemon_leaves_jobs_undisturbed_and_a_killed_host_is_started_again(
    launch: Launch, tmp_path: Path
) -> None:
    write_script(tmp_path)
    crash(tmp_path, "start, trains", "submit", "a")
    home = Home(tmp_path / "state")
    host = read_host(home.job("j1"))
    assert host is not None
    assert host.host.alive()
    with running(tmp_path, spare=0) as daemon:
        until(daemon, lambda: daemon.service.job("a", None).step > 3, "is taken back")
        taken_back = daemon.service.job("a", None)
        assert (taken_back.state, taken_back.attempts) == (JobState.RUNNING, 1)
        assert read_host(home.job("j1")) == host
        with pytest.raises(UsageError, match=r"a cluster is running in .* already"):
            Daemon(home, layout_of_slots("cpu:4"), "wfs")
        daemon.service.scale("a", None, min=2, max=2)
        until(daemon, lambda: daemon.service.job("a", None).workers == 2, "shrinks")
        until(daemon, lambda: any((home.job("j1") / CHECKPOINTS).glob("step-*")), "has a checkpoint")
        assert host.host.end(timeout_s=60.0)
        until(daemon, lambda: daemon.service.job("a", None).attempts == 2, "is started again")
        (tmp_path / "hurry-a").touch()
        (record,) = finished(daemon, "j1")
        assert "restarted" in [event.kind for event in daemon.service.events(None)]
    assert record.digest == fixed(launch, spec(tmp_path, STEPS, PAUSE_S))


def test_a_job_that_restarts_its_workers_keeps_its_devices(tmp_path: Path) -> None:
    """Its status has no workers and no devices; no other job is placed there."""
    home = Home(tmp_path / "state")
    home.make()
    store = Store(home.database)
    registry = Registry(store)
    running_job = registry.add(JobSpec(script="x.py", workdir=str(tmp_path)), "me", "default")
    registry.move(running_job.id, JobState.STARTING, "started", devices=(0,), attempts=1)
    registry.move(running_job.id, JobState.RUNNING, "running")
    store.close()
    (tmp_path / "x.py").touch()
    with FakeJob("j1", home.job("j1"), home.sockets) as job:
        job.status = job_status(JobPhase.TRAINING, (0,))
        with Daemon(home, layout_of_slots("cpu:1"), "wfs", spare=0) as daemon:
            service = daemon.service
            until(daemon, lambda: service.job("j1", None).workers == 1, "trains")
            service.submit(JobSpec(script="x.py", workdir=str(tmp_path), priority=1), "me")
            job.status = job_status(JobPhase.RESTARTING)
            until(daemon, lambda: service.job("j1", None).workers == 0, "restarts")
            assert service.devices()[0].job == "j1"
            found = service.job("j1", None)
            assert (found.state, found.devices, found.attempts) == (JobState.RUNNING, (0,), 1)
            service.shutdown(checkpoint=False)


def test_the_time_for_which_the_machine_was_off_does_not_count(tmp_path: Path) -> None:
    home, now = Home(tmp_path / "state"), [1000.0]
    home.make()
    store = Store(home.database, born=0.0)
    registry = Registry(store, clock=lambda: now[0])
    record = registry.add(JobSpec(script="x.py", time_limit=100.0), "me", "default")
    registry.move(record.id, JobState.STARTING, "started", devices=(0,), attempts=1)
    registry.move(record.id, JobState.RUNNING, "running")
    logs = home.job(record.id) / "logs"
    logs.mkdir(parents=True)
    (logs / "output.log").touch()
    os.utime(logs / "output.log", (1060.0, 1060.0))
    now[0] = 90_000.0
    layout, pool = layout_of_slots("cpu:1"), HostPool(home.log, spare=0)
    cluster = LocalCluster(home, registry, layout, layout.scheduler_state("wfs"), pool)
    cluster.observe()
    found = registry.get(record.id)
    assert (found.state, found.ran, found.intent) == (JobState.SUSPENDED, 60.0, Intent.RUN)
    store.close()
