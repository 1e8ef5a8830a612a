"""A job that reaches no boundary gives devices back all the same, within the grace of the cluster, and keeps its bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gyrostat.cluster import eviction
from gyrostat.cluster.layout import read_layout
from gyrostat.cluster.records import JobState
from gyrostat.local.host_files import read_host
from tests.conftest import Launch
from tests.local.clusters import SCRIPT, at_step, finished, fixed, running, spec, until, write_script

_TENANTS = """
cell_types:
  box: {of: cpu, count: 1, node: true}
physical_cluster:
  - {cell: box, nodes: [b0, b1]}
virtual_clusters:
  vision: {cells: {box: 1}}
  speech: {cells: {box: 1}}
"""
_HOLDS = """
def hold(where):
    if where == os.environ.get("HOLD"):
        open(f"held-{os.getpid()}", "w").close()
        while not os.path.exists("release"):
            time.sleep(0.01)

hold("start")
job = gyrostat.init(seed=5)"""


def _script() -> str:
    """`SCRIPT`, which reaches no boundary from one of three places on until a file exists."""
    text = SCRIPT.replace("\njob = gyrostat.init(seed=5)", _HOLDS)
    text = text.replace(
        "        for x, y in step:", "        for x, y in step:\n            job.step == 3 and hold('step')"
    )
    evaluates = (
        "        if job.step == 3:\n            job.evaluate(loader, lambda batch: hold('evaluate'))\n"
    )
    return text.replace("        job.log(lr=0.01)\n", evaluates + "        job.log(lr=0.01)\n")


@pytest.mark.parametrize(
    ("where", "least", "stopped"),
    [
        pytest.param("step", 1, False, id="a long step, one device of two"),
        pytest.param("step", 2, False, id="a long step, all devices"),
        pytest.param("start", 1, False, id="before its first loop, one device of two"),
        pytest.param("evaluate", 2, False, id="an evaluation, all devices"),
        pytest.param("step", 1, True, id="stopped processes, one device of two"),
    ],
)
def test_an_owner_gets_its_cell_back_in_time(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, least: int, stopped: bool
) -> None:
    """The owner trains while the borrower still stands where it reaches no boundary."""
    monkeypatch.setattr(eviction, "RESPONSE_S", 1.0 if stopped else 60.0)
    write_script(tmp_path, _script())
    low = spec(
        tmp_path,
        20,
        virtual_workers=2,
        min=least,
        opportunistic=True,
        checkpoint_every=1,
        env={"HOLD": where},
        name="low",
    )
    theirs = spec(tmp_path, 100_000, virtual_workers=1, name="theirs")
    with running(tmp_path, read_layout(_TENANTS), grace=1.0) as daemon:
        service = daemon.service
        id_ = service.submit(low, "speech").id
        until(daemon, lambda: len(list(tmp_path.glob("held-*"))) == 2, "reaches no boundary")
        if where != "start":
            until(daemon, lambda: service.job(id_, None).state is JobState.RUNNING, "trains")
        if stopped:
            host = read_host(daemon.home.job(id_))
            assert host is not None
            for pid in (host.host.pid, *(int(path.name[5:]) for path in tmp_path.glob("held-*"))):
                os.kill(pid, signal.SIGSTOP)
        owner = service.submit(theirs, "vision").id
        at_step(daemon, owner, 1)
        assert not (tmp_path / "release").exists()
        evicted = [event.reason for event in service.events(None) if event.kind == "evicted"]
        blocked = [event.reason for event in service.events(None) if event.kind == "blocked"]
        assert len(evicted) == 1 + stopped
        assert "within 1 s" in evicted[0]
        assert f"its devices are still held by {id_} (on " in blocked[0]
        (tmp_path / "release").touch()
        if least == 1:
            at_step(daemon, id_, 20)
        service.cancel(owner, "vision")
        (record,) = finished(daemon, id_)
    assert record.attempts == (1 if where == "step" and least == 1 and not stopped else 2)
    assert record.digest == fixed(launch, low)


@pytest.mark.parametrize("ends_daemon", [False, True], ids=["paused", "down"])
def test_a_job_that_reaches_no_boundary_is_stopped_in_time(
    launch: Launch, tmp_path: Path, ends_daemon: bool
) -> None:
    """Its owner pauses it, or the cluster is stopped: it goes on from its newest checkpoint."""
    write_script(tmp_path, _script())
    held = spec(tmp_path, 20, virtual_workers=2, checkpoint_every=1, env={"HOLD": "step"}, name="held")
    with running(tmp_path, read_layout(_TENANTS), grace=1.0) as daemon:
        service = daemon.service
        id_ = service.submit(held, "vision").id
        until(daemon, lambda: bool(list(tmp_path.glob("held-*"))), "reaches no boundary")
        until(daemon, lambda: service.job(id_, None).state is JobState.RUNNING, "trains")
        if not ends_daemon:
            service.pause(id_, "vision")
            until(daemon, lambda: service.job(id_, None).state is JobState.PAUSED, "is paused")
    assert not (tmp_path / "release").exists()
    (tmp_path / "release").touch()
    with running(tmp_path, read_layout(_TENANTS), grace=1.0) as daemon:
        if not ends_daemon:
            daemon.service.resume(id_, "vision")
        (record,) = finished(daemon, id_)
    assert record.digest == fixed(launch, held)
