"""The death of a worker leaves traces: events of the cluster, lines in the job's log, and a number."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import JobState
from gyrostat.cluster.registry import Registry
from gyrostat.local.home import Home
from gyrostat.local.incidents import Incident, IncidentKind, encode_incident, incidents_file
from gyrostat.local.job_events import JobEvents
from gyrostat.local.store import Store
from tests.conftest import Launch
from tests.local.clusters import SCRIPT, at_step, finished, fixed, hurry, running, spec, until, write_script

_KINDS = ("worker died", "recovered", "workers restart")


def test_a_killed_worker_is_recorded_with_its_evidence_and_what_came_of_it(
    launch: Launch, tmp_path: Path
) -> None:
    """One of two is killed, and the other goes on; then all are killed, and the job restarts."""
    text = SCRIPT.replace("for epoch in", "open(f'pid-{os.getpid()}', 'w').close()\nfor epoch in")
    write_script(tmp_path, text)
    job = spec(tmp_path, 2000, 0.02, virtual_workers=2, checkpoint_every=1, name="n")

    def pids() -> set[int]:
        return {int(path.name[4:]) for path in tmp_path.glob("pid-*")}

    with running(tmp_path, "cpu:2") as daemon:
        service = daemon.service
        id_ = service.submit(job, "me").id

        def happened() -> list[tuple[str, str]]:
            events = [event for event in service.events(None) if event.job == id_ and event.kind in _KINDS]
            return [(event.kind, event.reason) for event in events]

        at_step(daemon, id_, 3)
        killed = min(pids())
        os.kill(killed, signal.SIGKILL)
        until(daemon, lambda: len(happened()) == 2, "one death is recorded")
        (first, how), (second, cost) = happened()
        assert (first, second) == ("worker died", "recovered")
        assert "was killed by SIGKILL, after step " in how
        assert "1 of 2 workers went on after step " in cost
        assert " micro-batch" in cost
        until(daemon, lambda: len(pids()) == 3 and service.job(id_, None).workers == 2, "is replaced")
        for pid in pids() - {killed}:
            os.kill(pid, signal.SIGKILL)
        until(daemon, lambda: happened()[-1][0] == "workers restart", "a restart is recorded")
        assert "from the checkpoint of step " in happened()[-1][1]
        deaths = service.job(id_, None).worker_deaths
        assert deaths == [kind for kind, _ in happened()].count("worker died") >= 2
        log = (daemon.home.job(id_) / "logs" / "host.log").read_text()
        for kind, reason in happened():
            assert f"{kind}: {reason.split('; it was running')[0]}" in log
        hurry(job)
        (record,) = finished(daemon, id_)
    assert record.digest == fixed(launch, job)


def test_every_incident_becomes_one_event_whenever_the_daemon_is_killed(tmp_path: Path) -> None:
    home = Home(tmp_path / "state")
    home.make()
    died = encode_incident(Incident(IncidentKind.WORKER_DIED, "worker 1 was killed by SIGKILL, after step 3"))
    registry = Registry(store := Store(home.database))
    id_ = registry.add(JobSpec(script="x.py"), "me", "default").id
    JobEvents(home, registry, 30.0).record_incidents(id_)
    path = incidents_file(home.job(id_))
    path.parent.mkdir(parents=True)
    path.write_text(f"{died}\n{died}\n{died[:20]}")
    events = JobEvents(home, registry, 30.0)
    for _ in range(2):
        events.record_incidents(id_)
        assert (registry.get(id_).worker_deaths, registry.get(id_).incidents) == (2, 2)
    store.close()
    registry = Registry(store := Store(home.database))  # the next daemon
    path.write_text(f"{died}\n{died}\n{died}\n")
    JobEvents(home, registry, 30.0).record_incidents(id_)
    assert [event.kind for event in registry.events()] == ["submitted", *["worker died"] * 3]
    assert (registry.get(id_).state, registry.get(id_).worker_deaths) == (JobState.QUEUED, 3)
    store.close()
