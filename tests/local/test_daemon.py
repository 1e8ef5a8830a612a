"""The daemon keeps house while it is watched, and takes what the disk did not take with it when it ends."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import JobState
from gyrostat.cluster.registry import Registry
from gyrostat.core.errors import StorageFull, UsageError
from gyrostat.local import daemon as module
from gyrostat.local.daemon import Daemon
from gyrostat.local.home import Home
from gyrostat.local.layout import layout_of_slots
from gyrostat.local.rotating_log import cut
from gyrostat.local.store import Store

SPEC = JobSpec(script="x.py")


def daemon_in(home: Home) -> Daemon:
    return Daemon(home, layout_of_slots("cpu:1"), "wfs", keep=5.0, spare=0)


def test_house_is_kept_however_short_each_wait_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLEAN_UP_S", 0.01)
    home = Home(tmp_path / "state")
    with daemon_in(home) as daemon:
        job = daemon.registry.add(SPEC, "me", "default")
        daemon.registry.move(job.id, JobState.CANCELLED, "old", finished=time.time() - 10.0)
        home.job(job.id).mkdir()
        for number in range(30):
            (home.recordings / f"{number}.jsonl").touch()
        daemon.registry.trouble = "full"
        deadline = time.monotonic() + 120.0
        while daemon.registry.jobs() and time.monotonic() < deadline:
            assert not daemon.wait(0.001)
        assert daemon.registry.jobs() == []
        assert not home.job(job.id).exists()
        assert len(daemon.home.recording_files()) == 20
        assert daemon.registry.trouble is None


@pytest.mark.parametrize("checkpoint", [True, False])
def test_the_end_that_was_asked_for_first_is_the_one(tmp_path: Path, checkpoint: bool) -> None:
    """One may leave the daemon at once after asking for its end: jobs stop nevertheless."""
    with daemon_in(Home(tmp_path / "state")) as daemon:
        daemon.service.shutdown(checkpoint=checkpoint)
        daemon.cluster.shut_down(checkpoint=not checkpoint)
    assert daemon.cluster.stops_jobs is checkpoint


def test_what_could_not_be_written_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageFull("the disk is full")

    home = Home(tmp_path / "state")
    with daemon_in(home) as daemon:
        job = daemon.registry.add(SPEC, "me", "default")
        with monkeypatch.context() as disk:
            disk.setattr(daemon.registry.store, "put", full)
            daemon.registry.move(job.id, JobState.CANCELLED, "while it was full", "cancelled")
    store = Store(home.database)
    assert Registry(store).get(job.id).reason == "while it was full"
    store.close()


def test_a_log_that_others_append_to_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    with log.open("ab", buffering=0) as file:
        for content in (b"one", b"two", b"three"):
            file.write(content)
            cut(log, largest=2, kept=2)
        file.write(b"4")
        cut(log, largest=2, kept=2)
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {"daemon.log": b"4", "daemon.log.1": b"three", "daemon.log.2": b"two"}


def test_a_directory_that_was_there_is_made_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "state")
    home.path.mkdir(mode=0o755)
    home.make()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (home.path, home.sockets)} == {0o700}


def test_a_directory_with_other_things_in_it_is_left_as_it_is(tmp_path: Path) -> None:
    home = Home(tmp_path / "project")
    home.path.mkdir(mode=0o755)
    (home.path / "train.py").touch()
    with pytest.raises(UsageError, match="open to other users and has other files in it"):
        home.make()
    assert [path.name for path in home.path.iterdir()] == ["train.py"]
