"""Jobs with parameter servers on a real cluster: workers on its devices, servers on their tenant's server cores."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.layout import read_layout
from gyrostat.cluster.records import JobState
from gyrostat.core.errors import Unplaceable, UsageError, WrongState
from gyrostat.core.roles import ServerRecovery
from gyrostat.job.control.client import JobClient
from gyrostat.local.daemon import Daemon
from tests.job.server_job.counting import EPOCHS, SAMPLES, SCRIPT, UPDATES
from tests.local.clusters import finished, running, until

CELLS = """
cell_types:
  box: {of: cpu, count: 4, node: true}
physical_cluster:
- {cell: box, nodes: [b0, b1]}
virtual_clusters:
  ads: {cells: {box: 1}, servers: {cores: 3, memory: 4000}}
  vision: {cells: {box: 1}}
"""


def spec(directory: Path, name: str, **fields: Any) -> JobSpec:
    workdir = directory / name
    workdir.mkdir(exist_ok=True)
    (workdir / "count.py").write_text(SCRIPT)
    env = {"SECONDS_PER_BATCH": "0.005"}
    return JobSpec(script="count.py", name=name, workdir=str(workdir), env=env, **{"servers": 2, **fields})


def hold(job: JobSpec) -> Path:
    """Its workers wait in their batches until the file is removed."""
    path = Path(job.workdir) / "hold"
    path.touch()
    return path


def counts(job: JobSpec) -> list[float]:
    found: list[float] = json.loads((Path(job.workdir) / "counts.json").read_text())
    return found


def kinds(daemon: Daemon, id_: str) -> list[str]:
    return [event.kind for event in daemon.service.events(None) if event.job == id_]


def at_update(daemon: Daemon, id_: str, update: int) -> None:
    until(daemon, lambda: daemon.service.job(id_, None).step >= update, f"{id_} at update {update}")


def test_a_server_job_is_scaled_loses_processes_and_counts_every_sample_once(tmp_path: Path) -> None:
    job = spec(tmp_path, "count", max=2)
    with running(tmp_path, "cpu:4", spare=1) as daemon:
        service = daemon.service
        id_ = service.submit(job, "me").id
        at_update(daemon, id_, 10)
        held = hold(job)
        record = service.job(id_, None)
        assert (len(record.devices), record.servers) == (2, 2)
        with JobClient(id_, at=daemon.home.control_sockets) as client:
            servers = client.status().servers
        assert servers is not None
        os.kill(servers[0].pids[0], signal.SIGKILL)
        until(daemon, lambda: "server died" in kinds(daemon, id_), "a server has died")
        service.scale(id_, None, servers=1)
        until(daemon, lambda: service.job(id_, None).servers == 1, "has 1 server")
        until(daemon, lambda: "servers scaled" in kinds(daemon, id_), "says so")
        service.scale(id_, None, min=3, max=3)
        until(daemon, lambda: service.job(id_, None).workers == 3, "has 3 workers")
        held.unlink()
        (record,) = finished(daemon, id_)
    assert counts(job) == [float(EPOCHS)] * SAMPLES
    assert (record.step, record.digest is not None) == (UPDATES, True)


def test_paused_and_resumed_it_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    job = spec(tmp_path, "count", max=2)
    with running(tmp_path, "cpu:2", spare=1) as daemon:
        service = daemon.service
        id_ = service.submit(job, "me").id
        at_update(daemon, id_, 20)
        service.pause(id_, None)
        until(daemon, lambda: service.job(id_, None).state is JobState.PAUSED, "is paused")
        service.resume(id_, None)
        (record,) = finished(daemon, id_)
    assert counts(job) == [float(EPOCHS)] * SAMPLES
    assert record.attempts == 2


def test_jobs_wait_for_their_tenants_server_cores_and_are_told_so(tmp_path: Path) -> None:
    first, second = spec(tmp_path, "first"), spec(tmp_path, "second")
    with running(tmp_path, read_layout(CELLS), spare=1) as daemon:
        service = daemon.service
        one = service.submit(first, "ads").id
        at_update(daemon, one, 5)
        held = hold(first)
        two = service.submit(second, "ads").id
        until(daemon, lambda: service.why_waiting(two, None) is not None, "second waits")
        waiting = service.why_waiting(two, None)
        assert waiting is not None
        assert "its servers need 2 cores, and ads has 1 core and 4000 bytes of memory left" in waiting.why
        with pytest.raises(Unplaceable, match="need 4 cores, and virtual cluster 'ads' has 3 cores"):
            service.scale(one, None, servers=4)
        service.scale(two, None, servers=1)
        at_update(daemon, two, 1)
        with pytest.raises(WrongState, match="need 2 cores, and ads has 1 core"):
            service.scale(two, None, servers=2)
        held.unlink()
        finished(daemon, one, two)
    assert counts(first) == counts(second) == [float(EPOCHS)] * SAMPLES


def test_what_can_never_run_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, read_layout(CELLS), spare=0) as daemon:
        service = daemon.service
        with pytest.raises(Unplaceable, match="has 0 cores for parameter servers"):
            service.submit(spec(tmp_path, "a", vc="vision"), "vision")
        with pytest.raises(Unplaceable, match="need 4 cores, and virtual cluster 'ads' has 3 cores"):
            service.submit(spec(tmp_path, "b", servers=2, server_cores=2), "ads")
        with pytest.raises(Unplaceable, match="need 2 cores and 6000 bytes of memory"):
            service.submit(spec(tmp_path, "c", server_memory=3000), "ads")
        with pytest.raises(Unplaceable, match="not opportunistic"):
            service.submit(spec(tmp_path, "d", opportunistic=True), "ads")
        with pytest.raises(UsageError, match="recovery by replica needs at least 2 servers"):
            service.submit(spec(tmp_path, "e", servers=1, server_recovery=ServerRecovery.REPLICA), "ads")
