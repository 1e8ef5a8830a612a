"""What a live cluster knows of the throughput of its jobs: declared, measured, and kept for later ones."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from gyrostat.local.store import Store
from gyrostat.sched.planner.history import Observation
from gyrostat.sched.recording import replay
from gyrostat.sim.setup import read_setup
from tests.local.clusters import at_step, finished, running, spec, until, write_script

PACED = "fast:2@400,slow:2@100"


def test_measurements_are_kept_in_the_database(tmp_path: Path) -> None:
    store = Store(tmp_path / "cluster.db")
    seen = [Observation("train.py", "fast", 1, 40.0), Observation("train.py", "slow", 1, 10.0)]
    store.observe(seen)
    store.close()
    again = Store(tmp_path / "cluster.db")
    assert again.observations() == seen
    again.close()


def test_a_database_from_before_measurements_were_kept_is_opened(tmp_path: Path) -> None:
    Store(tmp_path / "cluster.db").close()
    with sqlite3.connect(tmp_path / "cluster.db") as db:
        db.execute("DROP TABLE observations")
    db.close()
    store = Store(tmp_path / "cluster.db")
    assert store.observations() == []
    store.close()


def test_a_live_job_gets_the_devices_that_help_it_and_what_it_measures_is_kept(tmp_path: Path) -> None:
    """8 virtual workers on devices of speed 4 : 1: the two fast ones alone are as fast as all four. Where all types were
    taken to be equal, the job ran on all four at half the speed.
    """
    write_script(tmp_path)
    job = spec(tmp_path, 400, 0.0, name="mixed", virtual_workers=8, min=1, mix_types=True)
    with running(tmp_path, PACED, "easyscale", spare=2) as daemon:
        id_ = daemon.service.submit(job, "me").id
        at_step(daemon, id_, 5)
        types = {device.type for device in daemon.service.devices() if device.job == id_}
        assert types == {"fast"}
        until(
            daemon,
            lambda: daemon.cluster.ask(lambda state: any(each.measured for each in state.jobs.values())),
            "is measured",
        )
        finished(daemon, id_)
        until(daemon, lambda: bool(daemon.registry.store.observations()), "its measurement is kept")
        (recording,) = daemon.home.recording_files()
    assert replay(recording, lambda setup: read_setup(setup).scheduler_state()).difference is None
    with running(tmp_path, PACED, "easyscale", spare=0) as daemon:
        (seen,) = daemon.registry.store.observations()
        assert (seen.workload, seen.type) == ("train.py", "fast")
        setup = daemon.layout.setup("easyscale", daemon.registry.store.observations())
        assert [each["workload"] for each in setup["history"]] == ["train.py"]


def test_shares_follow_the_pace_of_devices(tmp_path: Path) -> None:
    """16 virtual workers get all four devices, because 7 + 7 + 1 + 1 are faster than 8 + 8; with the bits of one worker."""
    write_script(tmp_path)
    job = spec(tmp_path, 60, 0.0, name="mixed", virtual_workers=16, min=1, mix_types=True)
    with running(tmp_path, PACED, "easyscale", spare=2) as daemon:
        id_ = daemon.service.submit(job, "me").id
        at_step(daemon, id_, 5)
        assert len([device for device in daemon.service.devices() if device.job == id_]) == 4
        status = daemon.cluster.ask(lambda state: [each.all_counts() for each in state.jobs.values()])
        assert status == [{"fast": 2, "slow": 2}]
        one = spec(tmp_path, 60, 0.0, name="one", virtual_workers=16, min=1, max=1)
        records = finished(daemon, id_, daemon.service.submit(one, "me").id)
    assert records[0].digest == records[1].digest
