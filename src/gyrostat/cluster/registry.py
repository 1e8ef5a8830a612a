"""All jobs and events of a cluster, in memory and in a durable store, for the service and the scheduling loop.

A change is durable before it is visible, with one exception: if the disk is full, running jobs go on. Their changes are
kept in memory, written when there is room again, and reported as trouble; new submissions and requests are refused. Progress
(step, loss, throughput) is in memory only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any, Protocol

import msgspec

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import EventRecord, JobRecord, JobState
from gyrostat.core.errors import NoSuchJob, StorageFull
from gyrostat.core.plural import plural_range
from gyrostat.sched.planner.history import Observation

_REMEMBERED = 10_000
"""Events that are kept in memory; the store has older ones."""
logger = logging.getLogger(__name__)


class RecordStore(Protocol):
    """Where records are durable. Writes are durable when they return, or raise `StorageFull`; `local.store.Store` is one."""

    @property
    def born(self) -> float:
        """When the cluster was first started, in seconds since the epoch."""

    def jobs(self) -> list[JobRecord]:
        """All of them, in the order of submission."""

    def last_job(self) -> int:
        """The highest number that a job was ever given."""

    def last_event(self) -> int: ...

    def events(self, since: int = 0, limit: int = 10_000) -> list[EventRecord]:
        """Those after number `since`, the oldest first."""

    def reservations(self) -> dict[str, int]:
        """Devices by type that serving loads have."""

    def observations(self) -> list[Observation]:
        """What jobs have measured of their workload on a device type, the oldest first."""

    def observe(self, observations: Iterable[Observation]) -> None:
        """Add measurements."""

    def put(self, record: JobRecord | None = None, events: Iterable[EventRecord] = ()) -> None:
        """Insert or replace a job, and add events: all or nothing."""

    def reserve(self, devices: Mapping[str, int]) -> None:
        """Replace all reservations."""

    def forget(self, before: float) -> list[int]:
        """Delete jobs that ended before that time, and older events. Returns the numbers of these jobs."""


class Registry:
    """May be used from any thread. `lock` makes several calls atomic."""

    def __init__(self, store: RecordStore, clock: Callable[[], float] = time.time) -> None:
        self.lock = threading.RLock()
        self.store = store
        self.clock = clock
        self._jobs = {record.id: record for record in store.jobs()}
        self._submissions = store.last_job()
        self._event = store.last_event()
        self._events: deque[EventRecord] = deque(
            store.events(max(0, self._event - _REMEMBERED)), maxlen=_REMEMBERED
        )
        self._unwritten: dict[str, JobRecord] = {}
        self._unwritten_events: list[EventRecord] = []
        self.trouble: str | None = None
        """Why records cannot be written at present."""

    # Reading.

    def jobs(self) -> list[JobRecord]:
        with self.lock:
            return list(self._jobs.values())

    def get(self, id_: str) -> JobRecord:
        with self.lock:
            if id_ not in self._jobs:
                raise NoSuchJob(f"there is no job {id_!r}")
            return self._jobs[id_]

    def events(self, since: int = 0, limit: int = 10_000) -> list[EventRecord]:
        """Those after number `since`, the oldest first."""
        with self.lock:
            if self._events and since + 1 >= self._events[0].number:
                newer = takewhile(lambda event: event.number > since, reversed(self._events))
                return list(newer)[::-1][:limit]
        return self.store.events(since, limit)

    def recent(self, number: int) -> list[EventRecord]:
        """The last ones, the newest last."""
        with self.lock:
            return list(self._events)[-number:]

    @property
    def last_event(self) -> int:
        """Its number."""
        return self._event

    # Writing.

    def add(
        self, spec: JobSpec, tenant: str, vc: str, beneath: tuple[tuple[str, ...], ...] = ()
    ) -> JobRecord:
        """Add a job; durable when this returns, or `StorageFull`."""
        with self.lock:
            now, number = self.clock(), self._submissions + 1
            record = JobRecord(
                id=f"j{number}",
                number=number,
                name=spec.title,
                tenant=tenant,
                vc=vc,
                spec=spec,
                beneath=beneath,
                submitted=now,
                changed=now,
                reason="submitted",
            )
            event = self._new_event(
                "submitted", f"{spec.title}: {plural_range(spec.min, spec.largest, 'device')}", record
            )
            self._save(record, event)
            self._submissions = number
            logger.info("submitted: %s of %s", spec.title, tenant, extra={"job": record.id})
            return record

    def update(self, id_: str, kind: str, reason: str, **fields: Any) -> JobRecord:
        """Change what its owner has requested; durable when this returns, or `StorageFull`."""
        with self.lock:
            record = msgspec.structs.replace(self.get(id_), **fields)
            self._save(record, self._new_event(kind, reason, record))
            return record

    def move(
        self,
        id_: str,
        state: JobState | None,
        reason: str | None,
        kind: str | None = None,
        *,
        before: tuple[int, ...] = (),
        **fields: Any,
    ) -> JobRecord:
        """Change its state and reason (None: keep them). Succeeds even if the disk is full."""
        with self.lock:
            previous = self.get(id_)
            reason = previous.reason if reason is None else reason
            record = previous.moved(state or previous.state, reason, self.clock(), **fields)
            if record.state is not previous.state:
                extra = {"job": id_, "step": record.step}
                logger.info("%s after %s: %s", record.state, previous.state, reason, extra=extra)
            event = None if kind is None else self._new_event(kind, reason, record, before, record.devices)
            self._save_later(record, event)
            return record

    def progress(self, id_: str, **fields: Any) -> None:
        """Update its progress; in memory only."""
        with self.lock:
            self._jobs[id_] = msgspec.structs.replace(self.get(id_), **fields)

    def note(
        self,
        kind: str,
        reason: str,
        job: JobRecord | None = None,
        before: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
        **fields: Any,
    ) -> None:
        """Add an event that changes no job's state, and these fields of the job with it. Succeeds even if the disk is full."""
        with self.lock:
            record = (
                msgspec.structs.replace(self.get(job.id), **fields) if job is not None and fields else None
            )
            self._save_later(record, self._new_event(kind, reason, job, before, after))

    def reserve(self, devices: Mapping[str, int], reason: str, kind: str) -> None:
        """Replace all reservations, by device type; durable when this returns, or `StorageFull`."""
        with self.lock:
            self.store.reserve(devices)
            self._save_later(None, self._new_event(kind, reason, None))

    def forget(self, before: float) -> list[JobRecord]:
        """Delete jobs that ended before that time; returns them."""
        with self.lock:
            numbers = set(self.store.forget(before))
            gone = [record for record in self._jobs.values() if record.number in numbers]
            for record in gone:
                del self._jobs[record.id]
            return gone

    def retry_writes(self) -> None:
        """Write what could not be written before."""
        with self.lock:
            if self.trouble is None:
                return
            try:
                for id_, record in list(self._unwritten.items()):
                    self.store.put(record)
                    del self._unwritten[id_]
                self.store.put(events=self._unwritten_events)
                self._unwritten_events.clear()
            except StorageFull as error:
                self.trouble = str(error)
                return
            self.trouble = None
            self.note("trouble", "the disk has room again; nothing was lost")

    # How.

    def _new_event(
        self,
        kind: str,
        reason: str,
        job: JobRecord | None,
        before: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
    ) -> EventRecord:
        return EventRecord(
            number=self._event + 1,
            at=self.clock(),
            kind=kind,
            job=None if job is None else job.id,
            tenant=None if job is None else job.tenant,
            reason=reason,
            before=before,
            after=after,
        )

    def _save(self, record: JobRecord, event: EventRecord) -> None:
        self.store.put(record, [event])
        self._unwritten.pop(record.id, None)
        self._jobs[record.id] = record
        self._remember(event)

    def _save_later(self, record: JobRecord | None, event: EventRecord | None) -> None:
        try:
            self.store.put(record, [] if event is None else [event])
        except StorageFull as error:
            self.trouble = str(error)
            if record is not None:
                self._unwritten[record.id] = record
            if event is not None:
                self._unwritten_events.append(event)
        else:
            if record is not None:
                self._unwritten.pop(record.id, None)
        if record is not None:
            self._jobs[record.id] = record
        if event is not None:
            self._remember(event)

    def _remember(self, event: EventRecord) -> None:
        self._event = event.number
        self._events.append(event)
