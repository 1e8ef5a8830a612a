"""A cluster, from Python: the same requests that the command line makes.

    from gyrostat.cluster.job_spec import JobSpec
    from gyrostat.local.client import connect

    with connect() as cluster:
        job = cluster.submit(JobSpec(script="train.py", virtual_workers=8, workdir="/home/me/mnist"))
        print(cluster.wait(job.id).digest)

Standard library and msgspec only. A client is for one thread. Errors of the cluster are raised as the same types here
(`NoSuchJob`, `Unplaceable`, `WrongState` …), or as `UsageError` with the cluster's message.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from gyrostat.cluster.api import messages as m
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import EventRecord, JobRecord, JobState, LogSource
from gyrostat.core.errors import (
    ClusterUnreachable,
    GyrostatError,
    NoSuchJob,
    StorageFull,
    Unplaceable,
    UsageError,
    WrongState,
)
from gyrostat.job.control.client import RequestFailed

T = TypeVar("T")
_ERRORS: dict[str, type[GyrostatError]] = {
    "no_such_job": NoSuchJob,
    "unplaceable": Unplaceable,
    "wrong_state": WrongState,
    "not_done": RequestFailed,
    "storage_full": StorageFull,
}
_IDLE_S = 15.0
"""A connection that was idle for longer may be closed by the server at any moment: a new one is opened."""
_ANSWER_S = 30.0
_WAIT_S = 30.0
"""How long one request waits for new lines or events."""


class _Problem(msgspec.Struct, frozen=True):
    code: str
    message: str


class ClusterClient:
    """A cluster, through its API. `job` is an id, or a name: then the newest job of that name."""

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise UsageError(f"a cluster's address is HOST:PORT or http(s)://HOST:PORT, got {url!r}")
        try:
            self._port = parts.port
        except ValueError as error:
            raise UsageError(f"a cluster's address is HOST:PORT, got {url!r}: {error}") from error
        self.url = url
        self._host, self._tls, self._token = parts.hostname, parts.scheme == "https", token
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0

    # Jobs.

    def submit(self, spec: JobSpec) -> JobRecord:
        """The job is durable when this returns. If the response is lost, it may or may not have been accepted: see `jobs`."""
        return self._post("/v1/jobs", spec, JobRecord)

    def jobs(
        self, *, ended: bool = True, state: JobState | None = None, tenant: str | None = None
    ) -> tuple[JobRecord, ...]:
        """In the order of submission."""
        return self._get("/v1/jobs", m.Jobs, ended=ended, state=state, tenant=tenant).jobs

    def status(self, job: str) -> m.JobStatus:
        return self._get(_job(job), m.JobStatus)

    def wait(self, job: str) -> JobRecord:
        """The job once it is over."""
        since = 0
        id_ = self.status(job).job.id
        while True:
            record = self.status(id_).job
            if record.state.over:
                return record
            since = self._await_event(since)

    def logs(
        self,
        job: str,
        *,
        source: LogSource = LogSource.OUTPUT,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Its lines so far, or the last `tail` of them; with `follow`, also those to come until it is over."""
        place, first = _job(job) + "/logs", True
        after: str | None = None
        while True:
            wait = _WAIT_S if follow and not first else None
            part = self._get(
                place, m.LogPart, source=source, tail=tail if first else None, after=after, wait=wait
            )
            yield from part.lines
            if part.over or not (follow or part.lines):
                return
            after, first = part.next or None, False

    def cancel(self, job: str) -> JobRecord:
        return self._post(_job(job) + "/cancel", m.Empty(), JobRecord)

    def pause(self, job: str) -> JobRecord:
        return self._post(_job(job) + "/pause", m.Empty(), JobRecord)

    def resume(self, job: str) -> JobRecord:
        return self._post(_job(job) + "/resume", m.Empty(), JobRecord)

    def scale(
        self,
        job: str,
        smallest: int | None = None,
        largest: int | None = None,
        *,
        servers: int | None = None,
    ) -> JobRecord:
        """Change its number of devices (equal numbers fix it), or of parameter servers; None: as before."""
        body = m.ScaleBody(min=smallest, max=largest, servers=servers)
        return self._post(_job(job) + "/scale", body, JobRecord)

    def migrate(self, job: str, workers: tuple[int, ...] = ()) -> m.Changed:
        """Replace these workers, or all, by new ones; returns when they train."""
        return self._post(_job(job) + "/migrate", m.MigrateBody(workers=workers), m.Changed, seconds=None)

    def profile(
        self, job: str, smallest: int | None = None, largest: int | None = None, steps: int = 20
    ) -> m.ProfileResult:
        """Measure it on several sizes; returns when it is back on its own size."""
        body = m.ProfileBody(smallest=smallest, largest=largest, steps=steps)
        return self._post(_job(job) + "/profile", body, m.ProfileResult, seconds=None)

    # The cluster.

    def about(self) -> m.About:
        return self._get("/v1", m.About)

    def overview(self) -> m.Overview:
        return self._get("/v1/overview", m.Overview)

    def devices(self) -> tuple[m.Device, ...]:
        return self._get("/v1/devices", tuple[m.Device, ...])

    def events(self, since: int = 0, *, follow: bool = False) -> Iterator[EventRecord]:
        """All after number `since`, the oldest first; with `follow`, also those to come, without end."""
        while True:
            found = self._get("/v1/events", m.Events, since=since, wait=_WAIT_S if follow else None)
            yield from found.events
            if found.next == since and not follow:
                return
            since = found.next

    # For operators.

    def reservations(self) -> m.Reservations:
        return self._get("/v1/reservations", m.Reservations)

    def reserve(self, type_: str, devices: int, wait: float = 0.0) -> m.Reservations:
        """Reserve this number of devices of a type for serving loads, in all; waits until jobs have left them."""
        body = m.ReserveBody(type=type_, devices=devices, wait=min(wait, m.LONGEST_WAIT_S))
        return self._post("/v1/reservations", body, m.Reservations, seconds=None)

    def recording(self) -> bytes:
        """What the scheduler observed and decided since the daemon started, for `sched.recording`."""
        return self._ask("GET", "/v1/recording", None, _ANSWER_S)

    def shutdown(self, *, checkpoint: bool = True) -> None:
        self._post("/v1/shutdown", m.ShutdownBody(checkpoint=checkpoint), m.About)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Implementation.

    def _await_event(self, since: int) -> int:
        """Return when there are events after number `since`, or after a while."""
        return self._get(
            "/v1/events", m.Events, since=since, wait=_WAIT_S if since else None, limit=10_000
        ).next

    def _get(self, path: str, kind: type[T], **query: Any) -> T:
        given = {name: _text(value) for name, value in query.items() if value is not None}
        wait = query.get("wait") or 0.0
        content = self._ask("GET", f"{path}?{urlencode(given)}" if given else path, None, _ANSWER_S + wait)
        return _decoded(content, kind)

    def _post(
        self, path: str, body: msgspec.Struct, kind: type[T], *, seconds: float | None = _ANSWER_S
    ) -> T:
        return _decoded(self._ask("POST", path, msgspec.json.encode(body), seconds), kind)

    def _ask(self, method: str, path: str, body: bytes | None, seconds: float | None) -> bytes:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        kept = self._connection is not None
        try:
            connection = self._connected(seconds)
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            if kept and method == "GET" and isinstance(error, ConnectionError):
                self.close()  # the cluster has closed a connection that was idle
                return self._ask(method, path, body, seconds)
            self.close()
            raise ClusterUnreachable(
                f"the cluster at {self.url} does not answer ({error or type(error).__name__}); is it up?"
            ) from error
        self._used = time.monotonic()
        if response.status >= 400:
            raise _error(response.status, content)
        return content

    def _connected(self, seconds: float | None) -> http.client.HTTPConnection:
        if self._connection is not None and time.monotonic() - self._used > _IDLE_S:
            self.close()
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
            self._connection = kind(self._host, self._port, timeout=seconds)
        self._connection.timeout = seconds
        if self._connection.sock is not None:
            self._connection.sock.settimeout(seconds)
        return self._connection


def _job(job: str) -> str:
    return f"/v1/jobs/{quote(job, safe='')}"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _decoded(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ClusterUnreachable(
            f"the server there is not a cluster of this version of gyrostat: {error}"
        ) from error


def _error(status: int, content: bytes) -> GyrostatError:
    try:
        problem = msgspec.json.decode(content, type=_Problem)
    except msgspec.DecodeError:
        return ClusterUnreachable(f"the server there is not a cluster: status {status}")
    kind = _ERRORS.get(problem.code, UsageError if status < 500 else GyrostatError)
    return kind(problem.message)
