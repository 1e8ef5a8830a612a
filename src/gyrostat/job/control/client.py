"""`JobClient`: sends requests to a running job, and waits for their replies."""

from __future__ import annotations

import contextlib
import difflib
import secrets
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.job.control.control_socket import (
    SUFFIX,
    check_name,
    control_socket_at,
    running,
    runtime_directory,
)
from gyrostat.job.control.device_assignment import Slot
from gyrostat.job.control.profiling import SizeMeasured
from gyrostat.job.control.requests import (
    AskCheckpoint,
    AskStatus,
    AskStop,
    Migrate,
    Occupy,
    ProfileJob,
    ProfileTable,
    Reply,
    Request,
    RequestResult,
    Scale,
    ScaleBy,
    ScaleRoles,
    Status,
)
from gyrostat.job.control.shard_service import OpenShards, Pulled, PullShard
from gyrostat.job.processes.channel import Channel
from gyrostat.job.processes.unix_socket import connect_to


class RequestFailed(GyrostatError):
    """The job refused a request, or could not carry it out."""


def check(result: RequestResult) -> RequestResult:
    """The result, if the request was carried out. Raises `UsageError` for bad input, otherwise `RequestFailed`."""
    if result.invalid:
        raise UsageError(result.text)
    if not result.done:
        raise RequestFailed(result.text)
    return result


class Transport(Protocol):
    """Carries requests to a job."""

    def ask(self, request: Request) -> Reply: ...

    def close(self) -> None: ...


class JobClient:
    """A running job, by its name if it has an agent on this machine, or through `via`."""

    def __init__(self, name: str, via: Transport | None = None, at: Path | None = None) -> None:
        """`at`: the directory of its control socket; the default is this user's `runtime_directory`."""
        check_name(name)
        self.name = name
        self._transport = via or _LocalTransport(name, at)

    def scale(self, workers: int, request: str | None = None) -> RequestResult:
        """Run on `workers` workers. Returns when they train, or when the change has failed."""
        return self._change(Scale(request or secrets.token_hex(8), workers))

    def scale_out(self, count: int = 1, request: str | None = None) -> RequestResult:
        """Add `count` workers."""
        return self._change(ScaleBy(request or secrets.token_hex(8), count))

    def scale_in(
        self, count: int | None = None, members: tuple[int, ...] = (), request: str | None = None
    ) -> RequestResult:
        """Remove `count` workers: the last ones, or `members`."""
        count = len(members) or 1 if count is None else count
        return self._change(ScaleBy(request or secrets.token_hex(8), -count, members))

    def scale_roles(
        self,
        workers: int | None = None,
        servers: int | None = None,
        *,
        relative: bool = False,
        request: str | None = None,
    ) -> RequestResult:
        """Change the number of workers and of parameter servers. `relative`: by these numbers."""
        return self._change(ScaleRoles(request or secrets.token_hex(8), workers, servers, relative))

    def profile(
        self,
        smallest: int | None = None,
        largest: int | None = None,
        steps: int = 20,
        request: str | None = None,
    ) -> tuple[SizeMeasured, ...]:
        """Throughput and efficiency on all sizes from `smallest` to `largest`; the default is the current size.

        `steps` steps are measured on each. Returns when the job is back on its original size; raises `RequestFailed` if
        the profile fails.
        """
        reply = self._ask(ProfileJob(request or secrets.token_hex(8), smallest, largest, steps))
        if isinstance(reply, ProfileTable):
            return reply.rows
        assert isinstance(reply, RequestResult)
        check(reply)
        raise AssertionError("a profile that is done has a table")

    def migrate(self, members: tuple[int, ...], request: str | None = None) -> RequestResult:
        """Replace these workers by new ones, in one switch."""
        return self._change(Migrate(request or secrets.token_hex(8), members))

    def occupy(self, slots: tuple[Slot, ...], request: str | None = None) -> RequestResult:
        """Run on exactly these devices."""
        return self._change(Occupy(request or secrets.token_hex(8), slots))

    def status(self) -> Status:
        """Raises `RequestFailed` if the job has no leader that could answer."""
        reply = self._ask(AskStatus())
        if isinstance(reply, RequestResult):
            check(reply)
        assert isinstance(reply, Status)
        return reply

    def checkpoint(self) -> RequestResult:
        return self._change(AskCheckpoint())

    def stop(self) -> RequestResult:
        return self._change(AskStop())

    def open_shards(
        self,
        queues: str,
        samples: int,
        *,
        shard_size: int,
        seed: int = 0,
        shuffle: bool = True,
        grain: int = 1,
        lease_seconds: float = 60.0,
    ) -> None:
        """Have the job serve shards of `samples` samples under this name. Idempotent; raises `RequestFailed` if the name
        is in use with other values."""
        check(self._change(OpenShards(queues, samples, shard_size, seed, shuffle, grain, lease_seconds)))

    def pull_shard(self, request: PullShard) -> Pulled:
        """Report trained samples, and get the next shard."""
        reply = self._ask(request)
        if isinstance(reply, RequestResult):
            check(reply)
        assert isinstance(reply, Pulled)
        return reply

    def _change(self, request: Request) -> RequestResult:
        reply = self._ask(request)
        assert isinstance(reply, RequestResult)
        return reply

    def _ask(self, request: Request) -> Reply:
        return self._transport.ask(request)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LocalTransport:
    """The control sockets of a job on this machine: its own, or those of its agents. If one closes, the request is sent
    to the next."""

    def __init__(self, name: str, at: Path | None) -> None:
        self._name, self._at = name, at
        self._channel = self._connect()

    def ask(self, request: Request) -> Reply:
        while True:
            try:
                self._channel.send(request)
                while (replies := self._channel.receive()) is not None:
                    if replies:
                        return replies[0]
            except (BrokenPipeError, ConnectionResetError):
                pass
            self._channel.close()
            try:
                self._channel = self._connect()
            except UsageError:
                raise UsageError(f"the job {self._name!r} ended before it answered") from None

    def _connect(self) -> Channel[Reply]:
        directory = self._at or runtime_directory()
        for path in (
            control_socket_at(directory, self._name),
            *sorted(directory.glob(f"{self._name}.*{SUFFIX}")),
        ):
            with contextlib.suppress(OSError):
                return Channel(connect_to(path), Reply)
        raise UsageError(_unknown(self._name))

    def close(self) -> None:
        self._channel.close()


def _unknown(name: str) -> str:
    names = [other for other in running() if other != name]
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"no job named {name!r} is running; did you mean {near[0]!r}?"
    known = f"running: {', '.join(names)}" if names else "no job of yours is running on this machine"
    return f"no job named {name!r} is running; {known}"
