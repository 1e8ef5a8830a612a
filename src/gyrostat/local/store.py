"""Durable records of a cluster on this machine: SQLite in WAL mode, every write on disk before it returns.

Records are stored as JSON, beside the few columns that are searched: a record can get new fields without a migration.
`SCHEMA` is the version of the tables. A full disk raises `StorageFull`, and the database stays consistent.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gyrostat.cluster.records import EventRecord, JobRecord
from gyrostat.core.errors import GyrostatError, StorageFull, UsageError
from gyrostat.sched.planner.history import Observation

SCHEMA = 1
T = TypeVar("T")
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    over INTEGER NOT NULL,
    finished REAL,
    record BLOB NOT NULL
);
CREATE INDEX jobs_over ON jobs (over, finished);
CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, record BLOB NOT NULL);
CREATE INDEX events_at ON events (at);
CREATE TABLE reservations (type TEXT PRIMARY KEY, devices INTEGER NOT NULL) WITHOUT ROWID;
"""
_OBSERVATIONS = """
CREATE TABLE IF NOT EXISTS observations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, workload TEXT NOT NULL, type TEXT NOT NULL, batch INTEGER NOT NULL,
    samples_per_second REAL NOT NULL
)
"""
_KEPT_OBSERVATIONS = 4_096


class Store:
    """One database; may be used from several threads."""

    def __init__(self, path: Path, *, born: float = 0.0) -> None:
        """`born`: the start of a new cluster's clock."""
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=5.0)
        except sqlite3.OperationalError as error:
            raise UsageError(f"the cluster's database {path} cannot be opened: {error}") from error
        try:
            self._open(path, born)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise UsageError(
                f"{path} cannot be used as the cluster's database: {error}; move it away, or choose another place: "
                "--state DIR"
            ) from error
        except BaseException:
            self._db.close()
            raise

    def _open(self, path: Path, born: float) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            with self._writing() as db:
                for statement in (*filter(str.strip, _TABLES.split(";")), _OBSERVATIONS):
                    db.execute(statement)
                db.execute("INSERT INTO meta VALUES ('born', ?)", (repr(born),))
                db.execute(f"PRAGMA user_version = {SCHEMA}")
            return
        if version != SCHEMA:
            raise UsageError(
                f"{path} was written by another version of gyrostat (tables {version}, this one has {SCHEMA}); "
                "use that version, or another place: --state DIR"
            )
        with self._writing() as db:  # of a database from before measurements were kept
            db.execute(_OBSERVATIONS)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # Reading.

    @property
    def born(self) -> float:
        """When the cluster was first started, in seconds since the epoch."""
        return float(self._all("SELECT value FROM meta WHERE key = 'born'")[0][0])

    def jobs(self) -> list[JobRecord]:
        """All of them, in the order of submission."""
        rows = self._all("SELECT record FROM jobs ORDER BY number")
        return [_decode_job(row[0]) for row in rows]

    def last_job(self) -> int:
        """The highest number that a job was ever given."""
        return self._last("jobs")

    def last_event(self) -> int:
        return self._last("events")

    def events(self, since: int = 0, limit: int = 10_000) -> list[EventRecord]:
        """Those after number `since`, the oldest first."""
        rows = self._all("SELECT record FROM events WHERE number > ? ORDER BY number LIMIT ?", since, limit)
        return [_decode(row[0], EventRecord) for row in rows]

    def reservations(self) -> dict[str, int]:
        return dict(self._all("SELECT type, devices FROM reservations ORDER BY type"))

    def observations(self) -> list[Observation]:
        """What jobs have measured of their workload on a device type, the oldest first."""
        rows = self._all("SELECT workload, type, batch, samples_per_second FROM observations ORDER BY number")
        return [Observation(*row) for row in rows]

    # Writing. Durable when it returns.

    def observe(self, observations: Iterable[Observation]) -> None:
        """Add measurements; the oldest ones beyond a few thousand are dropped."""
        with self._writing() as db:
            db.executemany(
                "INSERT INTO observations (workload, type, batch, samples_per_second) VALUES (?, ?, ?, ?)",
                [(each.workload, each.type, each.batch, each.samples_per_second) for each in observations],
            )
            db.execute(
                "DELETE FROM observations WHERE number <= (SELECT max(number) FROM observations) - ?",
                (_KEPT_OBSERVATIONS,),
            )

    def put(self, record: JobRecord | None = None, events: Iterable[EventRecord] = ()) -> None:
        """Insert or replace a job, and add events: all or nothing."""
        with self._writing() as db:
            if record is not None:
                db.execute(
                    "INSERT INTO jobs (number, over, finished, record) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (number) DO UPDATE SET over = excluded.over, finished = excluded.finished, "
                    "record = excluded.record",
                    (record.number, record.state.over, record.finished, msgspec.json.encode(record)),
                )
            db.executemany(
                "INSERT OR REPLACE INTO events (number, at, record) VALUES (?, ?, ?)",
                [(event.number, event.at, msgspec.json.encode(event)) for event in events],
            )

    def reserve(self, devices: Mapping[str, int]) -> None:
        """Replace all reservations, by type."""
        with self._writing() as db:
            db.execute("DELETE FROM reservations")
            db.executemany(
                "INSERT INTO reservations VALUES (?, ?)",
                [(t, number) for t, number in devices.items() if number],
            )

    def forget(self, before: float) -> list[int]:
        """Delete jobs that ended before that time, and older events. Returns the numbers of these jobs."""
        with self._writing() as db:
            gone = db.execute("SELECT number FROM jobs WHERE over AND finished < ?", (before,)).fetchall()
            if gone:
                db.execute("DELETE FROM jobs WHERE over AND finished < ?", (before,))
            db.execute("DELETE FROM events WHERE at < ?", (before,))
        return [number for (number,) in gone]

    # Implementation.

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                    raise StorageFull(
                        f"the cluster's database cannot be written: {error}; free some space, then try again"
                    ) from error
                raise

    def _all(self, query: str, *values: object) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _last(self, table: str) -> int:
        rows = self._all("SELECT seq FROM sqlite_sequence WHERE name = ?", table)
        return int(rows[0][0]) if rows else 0


def _decode_job(raw: bytes) -> JobRecord:
    """A job that another version accepted may have values in its spec that this one does not allow: they become the defaults,
    and the record says so (`defect`), so that one job never keeps the daemon from starting."""
    defects: list[str] = []
    found = msgspec.json.decode(raw)
    while True:
        try:
            record = msgspec.convert(found, JobRecord)
            break
        except msgspec.ValidationError as error:
            field = re.search(r"\$\.spec\.(\w+)|unknown field `(\w+)`", str(error))
            name = "" if field is None else field[1] or field[2]
            if found["spec"].pop(name, None) is None:
                raise GyrostatError(
                    f"a JobRecord in the cluster's database cannot be read: {error}"
                ) from error
            defects.append(str(error))
    if not defects or record.state.over:
        return record
    return msgspec.structs.replace(record, defect=f"its record is not valid: {'; '.join(defects)}")


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise GyrostatError(f"a {kind.__name__} in the cluster's database cannot be read: {error}") from error
