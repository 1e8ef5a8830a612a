"""What was accepted is on disk; a full disk refuses what is new, and loses nothing of what is known."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import JobState
from gyrostat.cluster.registry import Registry
from gyrostat.core.errors import NoSuchJob, StorageFull, UsageError
from gyrostat.local.store import SCHEMA, Store

SPEC = JobSpec(script="train.py", virtual_workers=2)


class LimitedStore(Store):
    """A store whose disk can be full."""

    def fill_up(self) -> None:
        """Not a page more than it has."""
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        self._db.execute(f"PRAGMA max_page_count = {pages}")

    def make_room(self) -> None:
        self._db.execute("PRAGMA max_page_count = 1000000")


def submit_without_end(registry: Registry) -> None:
    while True:
        registry.add(SPEC, "me", "default")


def test_all_records_are_restored(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    times = iter(range(100, 200))
    store = Store(path, born=90.0)
    registry = Registry(store, clock=lambda: float(next(times)))
    first, second = registry.add(SPEC, "me", "default"), registry.add(SPEC, "you", "default")
    assert (first.id, second.id) == ("j1", "j2")
    registry.move("j1", JobState.STARTING, "its turn", "started", devices=(0,), attempts=1)
    registry.reserve({"cpu": 2, "gpu": 0}, "2 cpu", "reserved")
    jobs, events = registry.jobs(), registry.events()
    store.close()
    again = Store(path, born=1.0)
    restored = Registry(again)
    assert restored.jobs() == jobs
    assert restored.events() == events
    assert [event.kind for event in events] == ["submitted", "submitted", "started", "reserved"]
    assert restored.events(since=2, limit=1) == events[2:3]
    assert again.born == 90.0
    assert again.reservations() == {"cpu": 2}
    assert restored.add(SPEC, "me", "default").id == "j3"
    again.close()


def test_ended_jobs_are_forgotten_and_their_numbers_never_used_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "cluster.db")
    registry = Registry(store, clock=lambda: 1000.0)
    for _ in range(2):
        registry.add(SPEC, "me", "default")
    registry.move("j2", JobState.CANCELLED, "enough", finished=1000.0)
    assert [job.id for job in registry.forget(before=999.0)] == []
    assert [job.id for job in registry.forget(before=1001.0)] == ["j2"]
    with pytest.raises(NoSuchJob):
        registry.get("j2")
    store.close()
    again = Store(tmp_path / "cluster.db")
    assert Registry(again).add(SPEC, "me", "default").id == "j3"
    again.close()


def test_a_full_disk_is_reported_and_not_fatal(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    store = LimitedStore(path)
    registry = Registry(store)
    registry.add(SPEC, "me", "default")
    store.fill_up()
    full = "cannot be written: database or disk is full; free some space"
    with pytest.raises(StorageFull, match=full):
        submit_without_end(registry)
    known = len(registry.jobs())
    for number in range(200):  # what runs goes on
        registry.note("moved", "x" * 500)
        registry.move("j1", JobState.STARTING, f"because {number}", "started")
    assert "full" in str(registry.trouble)
    with pytest.raises(StorageFull):
        registry.update("j1", "cancelling", "x" * 10_000)
    assert registry.get("j1").state is JobState.STARTING
    store.make_room()
    registry.retry_writes()
    assert registry.trouble is None
    jobs, last = registry.jobs(), registry.last_event
    store.close()
    again = Store(path)
    restored = Registry(again)
    assert restored.jobs() == jobs
    assert len(jobs) == known
    assert restored.get("j1").reason == "because 199"
    assert restored.last_event == last
    assert restored.events()[-1].reason == "the disk has room again; nothing was lost"
    again.close()


def test_databases_of_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "cluster.db"
    with sqlite3.connect(path) as other:
        other.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    other.close()
    with pytest.raises(UsageError, match=f"another version of gyrostat \\(tables {SCHEMA + 1}"):
        Store(path)
    path.write_bytes(b"not a database, but long enough to be looked at as one" * 100)
    with pytest.raises(UsageError, match="cannot be used as the cluster's database"):
        Store(path)
