"""Every operation of a cluster, for the API's handlers and for code in the daemon's process.

Every method may be called from any thread and returns at once, except where it states that it waits. `tenant` is the
requester: a tenant sees and changes its own jobs only, and cannot distinguish another tenant's job from one that does not
exist; None is the operator, who may do everything. A job is named by its id (`j17`), or by its name, which means the newest
job of that name.

Requests are durable before the call returns; the scheduling loop carries them out, even after a restart of the daemon. Errors
are those of `core.errors`:

    UsageError        invalid input; nothing was changed
      NoSuchJob       no such job, or another tenant's; suggests similar names
      Unplaceable     (submit, scale) this cluster can never run it, and why
      WrongState      (cancel, pause, resume, scale, migrate, profile) not possible in the job's state
      OutsideRoot     (submit) the job is outside the tenant's directory
    RequestFailed     (migrate, profile) the job could not do it, and why
    StorageFull       nothing was accepted: the disk is full
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import (
    DEFAULT_VC,
    DeviceRecord,
    EventRecord,
    Intent,
    JobRecord,
    LogChunk,
    LogSource,
    Waiting,
)
from gyrostat.cluster.registry import Registry
from gyrostat.core.errors import NoSuchJob, UsageError, WrongState
from gyrostat.core.plural import plural, plural_range
from gyrostat.core.roles import ServerCapacity
from gyrostat.job.control.profiling import SizeMeasured
from gyrostat.job.control.requests import RequestResult


class ClusterBackend(Protocol):
    """The running side of a cluster; `local.backend.LocalBackend` is one."""

    def virtual_clusters(self) -> Sequence[str]:
        """Their names."""

    def server_capacity(self, vc: str) -> ServerCapacity:
        """Cores and memory for parameter servers of this virtual cluster, in all."""

    def check_placeable(self, spec: JobSpec, vc: str) -> None:
        """Raise `Unplaceable` if the job could not run even alone."""

    def wake(self, id_: str) -> None:
        """This job is new, or its owner has requested something: see the registry."""

    def devices(self) -> list[DeviceRecord]: ...

    def capacity(self) -> Mapping[str, int]:
        """Devices by type."""

    def waiting(self, id_: str) -> Waiting | None:
        """Why it waits; None if it does not."""

    def migrate(self, id_: str, workers: tuple[int, ...]) -> RequestResult: ...

    def profile(
        self, id_: str, smallest: int | None, largest: int | None, steps: int
    ) -> tuple[SizeMeasured, ...]: ...

    def reserve(self, wanted: Mapping[str, int], wait: float) -> bool:
        """Reserve these devices, by type, for serving loads. Returns whether they are free within `wait` seconds."""

    def shut_down(self, checkpoint: bool) -> None: ...


class JobFiles(Protocol):
    """Where scripts, logs and recordings are."""

    def check(self, spec: JobSpec) -> None:
        """Raise `UsageError` if the job's working directory or script does not exist or is not allowed."""

    def check_below(self, spec: JobSpec, root: str) -> None:
        """Raise `OutsideRoot` if the job's working directory or script is not below `root`, links resolved."""

    @property
    def workdirs(self) -> tuple[str, ...]:
        """Directories below which all jobs run; empty: anywhere."""

    def read_log(
        self, id_: str, source: LogSource, *, after: str | None, tail: int | None, over: bool
    ) -> LogChunk:
        """The lines after position `after` (None: the first, or the last `tail`). `over`: the job has ended."""

    def recording(self) -> bytes | None:
        """Of the daemon's present run; None: nothing was recorded yet."""


class OutsideRoot(UsageError):
    """A tenant's job is not below the directory that the tenant's token allows."""


class ClusterService:
    """See the module's docstring."""

    def __init__(self, registry: Registry, backend: ClusterBackend, files: JobFiles) -> None:
        self._registry, self._backend, self._files = registry, backend, files

    # Submission.

    def submit(self, spec: JobSpec, tenant: str, root: str | None = None) -> JobRecord:
        """Accept a job. It is durable when this returns, and the loop will run it.

        With `root`, its working directory and script must be below that (`OutsideRoot`), now and whenever it is started.
        Raises `UsageError` (invalid, no such directory or script), `Unplaceable`, `StorageFull`.
        """
        spec.check()
        if root is not None:
            self._files.check_below(spec, root)
        self._files.check(spec)
        vc = self._vc_of(spec, tenant)
        self._backend.check_placeable(spec, vc)
        beneath = tuple(group for group in (self._files.workdirs, (root,) if root else ()) if group)
        record = self._registry.add(spec, tenant, vc, beneath)
        self._backend.wake(record.id)
        return record

    def _vc_of(self, spec: JobSpec, tenant: str) -> str:
        """The one it names, or else the tenant's own, or else the default one."""
        known = self._backend.virtual_clusters()
        own = tenant if tenant in known else DEFAULT_VC if DEFAULT_VC in known else None
        wanted = spec.vc or own
        if wanted is None:
            raise UsageError(
                f"name the virtual cluster: this cluster has {', '.join(known)}, and none is tenant {tenant!r}'s"
            )
        if wanted not in known:
            near = difflib.get_close_matches(wanted, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"there is no virtual cluster {wanted!r}; {hint}")
        return wanted

    # Queries.

    def jobs(self, tenant: str | None, *, ended: bool = True) -> list[JobRecord]:
        """All jobs that the tenant may see, in the order of submission."""
        return [
            record
            for record in self._registry.jobs()
            if tenant in (None, record.tenant) and (ended or not record.state.over)
        ]

    def job(self, named: str, tenant: str | None) -> JobRecord:
        """By id, or the newest of that name; a name never hides an id. Raises `NoSuchJob`."""
        mine = self.jobs(tenant)
        found = {record.name: record for record in mine} | {record.id: record for record in mine}
        if named in found:
            return found[named]
        near = difflib.get_close_matches(named, found)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise NoSuchJob(f"there is no job {named!r}{hint}", tuple(near))

    def devices(self) -> list[DeviceRecord]:
        """Every device with the job on it. Handlers hide other tenants' jobs from a tenant."""
        return self._backend.devices()

    def virtual_clusters(self) -> Sequence[str]:
        return self._backend.virtual_clusters()

    def events(self, tenant: str | None, since: int = 0, limit: int = 10_000) -> list[EventRecord]:
        """Those after number `since`, the oldest first; a tenant sees those of its jobs."""
        return [event for event in self._registry.events(since, limit) if tenant in (None, event.tenant)]

    def read_log(
        self, named: str, tenant: str | None, source: LogSource, *, after: str | None, tail: int | None
    ) -> LogChunk:
        """The next lines of one of its logs. Raises `NoSuchJob`."""
        record = self.job(named, tenant)
        return self._files.read_log(record.id, source, after=after, tail=tail, over=record.state.over)

    def why_waiting(self, named: str, tenant: str | None) -> Waiting | None:
        """Its place in the queue, why it waits and what would let it run; None if it does not wait. Raises `NoSuchJob`."""
        return self._backend.waiting(self.job(named, tenant).id)

    def recording(self) -> bytes | None:
        """What the scheduler observed and decided since the daemon started (`sched.recording`); None: nothing yet."""
        return self._files.recording()

    def trouble(self) -> str | None:
        """Why the cluster does not work as it should (a full disk); None: it does."""
        return self._registry.trouble

    # Requests.

    def cancel(self, named: str, tenant: str | None) -> JobRecord:
        """End it soon. Idempotent; `WrongState` if it has ended otherwise."""
        with self._registry.lock:
            record = self.job(named, tenant)
            if record.intent is Intent.CANCEL:
                return record
            self._check_not_over(record)
            updated = self._request(record, "cancelling", "its owner cancels it", Intent.CANCEL)
        return self._wake(updated)

    def pause(self, named: str, tenant: str | None) -> JobRecord:
        """Checkpoint it and take it out of the queue until `resume`. `WrongState` if it has ended or is being cancelled."""
        with self._registry.lock:
            record = self.job(named, tenant)
            if record.intent is Intent.PAUSE:
                return record
            self._check_not_over(record)
            updated = self._request(record, "pausing", "its owner pauses it", Intent.PAUSE)
        return self._wake(updated)

    def resume(self, named: str, tenant: str | None) -> JobRecord:
        """Put it back into the queue; it continues from its checkpoint, bit for bit. `WrongState` unless it is paused."""
        with self._registry.lock:
            record = self.job(named, tenant)
            self._check_not_over(record)
            if record.intent is Intent.RUN:
                raise WrongState(f"job {record.id} is {record.state}, not paused; there is nothing to resume")
            updated = self._request(record, "resumed", "its owner resumes it", Intent.RUN)
        return self._wake(updated)

    def scale(
        self,
        named: str,
        tenant: str | None,
        *,
        min: int | None = None,
        max: int | None = None,
        servers: int | None = None,
    ) -> JobRecord:
        """From now on it runs on `min` to `max` devices, and with `servers` parameter servers; None: as before. Equal numbers
        of devices pin it. The scheduler resizes it as soon as it can.

        Raises `UsageError` (not within its virtual workers), `Unplaceable`, `WrongState` (it has ended, or other jobs use the
        cores that its servers would need).
        """
        with self._registry.lock:
            record = self.job(named, tenant)
            self._check_not_over(record)
            spec = record.spec
            if servers is not None and not spec.servers:
                raise UsageError(
                    f"job {record.id} has no parameter servers: it was submitted without --servers"
                )
            if servers is not None and servers < 1:
                raise UsageError(f"job {record.id} needs at least 1 server, got {servers}")
            smallest = spec.min if min is None else min
            largest = spec.largest if max is None else max
            spec = msgspec.structs.replace(
                spec, min=smallest, max=largest, servers=spec.servers if servers is None else servers
            ).check()
            self._backend.check_placeable(spec, record.vc)
            if servers is not None:
                self._check_server_cores(record, spec)
            parts = [plural_range(smallest, largest, "device")] if (min, max) != (None, None) else []
            parts += [plural(servers, "server")] if servers is not None else []
            reason = f"its owner requests {' and '.join(parts)}"
            updated = self._registry.update(record.id, "scaled", reason, spec=spec)
        return self._wake(updated)

    def _check_server_cores(self, record: JobRecord, spec: JobSpec) -> None:
        """Raise `WrongState` if other running jobs of its virtual cluster use what its servers would need. A job that waits
        takes its servers when it starts."""
        role = spec.server_role
        if role is None or not (record.devices or record.holds_devices):
            return
        free = self._backend.server_capacity(record.vc)
        for other in self._registry.jobs():
            holds = other.vc == record.vc and (other.devices or other.holds_devices)
            if holds and other.id != record.id and other.spec.server_role is not None:
                free = free.without(other.spec.server_role.needs)
        if not role.needs.fits(free):
            raise WrongState(
                f"{role.count} servers of job {record.id} need {role.needs}, and {record.vc} has {free} left for them now"
            )

    def migrate(self, named: str, tenant: str | None, workers: tuple[int, ...] = ()) -> RequestResult:
        """Replace workers (all, or these) by new processes, in one reconfiguration; waits until that is done.

        Raises `WrongState` unless it runs, `RequestFailed` if the job could not do it.
        """
        return self._backend.migrate(self.job(named, tenant).id, workers)

    def profile(
        self,
        named: str,
        tenant: str | None,
        *,
        smallest: int | None = None,
        largest: int | None = None,
        steps: int = 20,
    ) -> tuple[SizeMeasured, ...]:
        """Measure its throughput on sizes up to the devices that it holds; waits until it is back on the size that it had.

        Raises `WrongState` unless it runs, `RequestFailed` if the job could not do it.
        """
        return self._backend.profile(self.job(named, tenant).id, smallest, largest, steps)

    # For operators only: the API's handlers check that.

    def reserve(self, type: str, devices: int, *, wait: float = 0.0) -> bool:
        """Reserve this number of devices of a type for serving loads, in all; jobs shrink or stop for it, and keep their bits.

        Waits up to `wait` seconds; returns whether they are free. 0 releases all. Raises `UsageError` (no such type, more
        than exist).
        """
        capacity = self._backend.capacity()
        if type not in capacity:
            raise UsageError(f"there are no devices of type {type!r} here; there are {', '.join(capacity)}")
        if not 0 <= devices <= capacity[type]:
            raise UsageError(
                f"of {capacity[type]} {type} devices, 0 to {capacity[type]} can be reserved; got {devices}"
            )
        kind = "reserved" if devices else "released"
        with self._registry.lock:
            wanted = {**self._registry.store.reservations(), type: devices}
            self._registry.reserve(wanted, f"{devices} {type} for a serving load", kind)
        return self._backend.reserve(wanted, wait)

    def reservations(self) -> dict[str, int]:
        """Devices reserved for serving loads, by type."""
        return self._registry.store.reservations()

    def shutdown(self, *, checkpoint: bool = True) -> None:
        """End the daemon: jobs checkpoint and wait for the next one; without `checkpoint` they train on and are adopted by it.

        Returns at once; the daemon is gone when its API is.
        """
        self._backend.shut_down(checkpoint)

    # Implementation.

    def _request(self, record: JobRecord, kind: str, reason: str, intent: Intent) -> JobRecord:
        return self._registry.update(record.id, kind, reason, intent=intent)

    def _wake(self, record: JobRecord) -> JobRecord:
        """Never while the registry is locked: the loop locks it, too."""
        self._backend.wake(record.id)
        return record

    @staticmethod
    def _check_not_over(record: JobRecord) -> None:
        if record.state.over:
            raise WrongState(f"job {record.id} has {_ended(record)} already")
        if record.intent is Intent.CANCEL:
            raise WrongState(f"job {record.id} is being cancelled")


def _ended(record: JobRecord) -> str:
    return {"cancelled": "been cancelled"}.get(record.state, str(record.state))
