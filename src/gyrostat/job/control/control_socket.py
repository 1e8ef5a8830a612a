"""The door of a running job: a Unix socket by which other processes of the same user ask it for something.

Requests and answers are frames of msgspec, as everywhere in this room. A request that changes something is answered when it
is done; one that comes while another is under way is answered "busy" at once; one that is asked twice, with the same id, is
carried out once and answered twice (`reception` sees to that). Sockets live in a directory that only this user may enter, so
that whoever can open one may also ask. `ControlSocket` is the job's side, for a loop that polls; `JobClient` is the other
side, and waits.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import secrets
import selectors
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.core.phase import JobPhase, ReconfigurationPhase
from gyrostat.job.control.device_assignment import Slot
from gyrostat.job.control.profiling import SizeMeasured
from gyrostat.job.control.shard_service import OpenShards, Pulled, PullShard
from gyrostat.job.processes.protocol import Channel, ProtocolError
from gyrostat.job.processes.unix_socket import bind_at, connect_to


class RequestFailed(GyrostatError):
    """The job could not do what it was asked for."""


NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = ".socket"


class Scale(msgspec.Struct, frozen=True, tag=True):
    """Run on so many workers."""

    request: str
    workers: int


class Migrate(msgspec.Struct, frozen=True, tag=True):
    """Replace these workers by new ones, in one switch."""

    request: str
    members: tuple[int, ...]


class ScaleBy(msgspec.Struct, frozen=True, tag=True):
    """Run on so many workers more, or fewer."""

    request: str
    by: int
    members: tuple[int, ...] = ()
    """Those that leave; without any, the last ones."""


class Occupy(msgspec.Struct, frozen=True, tag=True):
    """Run on exactly these devices, one worker on each; on none: checkpoint and wait. For a job that has a seating."""

    request: str
    slots: tuple[Slot, ...]


class ProfileJob(msgspec.Struct, frozen=True, tag=True):
    """Measure throughput on all sizes from `smallest` to `largest`, or on the size that the job has."""

    request: str
    smallest: int | None = None
    largest: int | None = None
    steps: int = 20


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """How is it?"""

    after_a_step: bool = False
    """Answered when it has trained a step since it was started, rather than at once."""


class AskCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Checkpoint at the next boundary."""


class AskStop(msgspec.Struct, frozen=True, tag=True):
    """Checkpoint at the next boundary, and end there."""


class RequestResult(msgspec.Struct, frozen=True, tag=True):
    """What came of a request."""

    done: bool
    text: str
    step: int = 0
    workers: int = 0
    pause_ms: float = 0.0
    prepare_ms: float = 0.0
    retryable: bool = False
    """Refused for now only: the same request may succeed later."""


class ProfileTable(msgspec.Struct, frozen=True, tag=True):
    """What a profile found, from the fewest workers to the most."""

    rows: tuple[SizeMeasured, ...]


class Status(msgspec.Struct, frozen=True, tag=True):
    """How a job is."""

    name: str
    program: str
    pid: int
    virtual_workers: int
    workers: int
    members: tuple[int, ...]
    generation: int
    phase: JobPhase
    reconfiguration: ReconfigurationPhase
    """How far a change of its workers is, while it trains."""
    step: int
    loss: float | None
    throughput: float | None
    """Samples per second of the last few seconds."""
    leader: str = ""
    """Where the agent is reached that leads a job on several nodes."""
    nodes: tuple[str, ...] = ()
    """Whose agents are there."""
    devices: tuple[int, ...] = ()
    """On which device each of `members` sits, if a scheduler hands them out."""

    @property
    def is_steady(self) -> bool:
        """It trains, and no change of its workers is under way."""
        return self.phase is JobPhase.TRAINING and self.reconfiguration is ReconfigurationPhase.STEADY


Request = (
    Scale
    | ScaleBy
    | Migrate
    | Occupy
    | ProfileJob
    | AskStatus
    | AskCheckpoint
    | AskStop
    | OpenShards
    | PullShard
)
Reply = RequestResult | ProfileTable | Status | Pulled


def runtime_directory() -> Path:
    """Where sockets are; only this user may enter it."""
    base = os.environ.get("GYROSTAT_RUNTIME_DIR") or os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "gyrostat" if base else Path(f"/tmp/gyrostat-{os.getuid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{path} must be a directory that only you may enter (owner {os.getuid()}, mode 700); remove it, or set "
            "GYROSTAT_RUNTIME_DIR to another place"
        )
    return path


def control_socket_at(directory: Path, name: str) -> Path:
    """The socket of a job's door."""
    return directory / f"{name}{_SUFFIX}"


def running() -> list[str]:
    """The names of jobs whose door can be found, though they may have been killed."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in runtime_directory().glob(f"*{_SUFFIX}"))


def check_name(name: str) -> None:
    if not NAMES.fullmatch(name):
        raise UsageError(
            f"a job's name is made of up to 64 letters, digits, dots, dashes and underscores; got {name!r}"
        )


class Connection:
    """Somebody at the door."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel: Channel[Request] = Channel(sock, Request)

    def answer(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):  # gone meanwhile
            self.channel.send(reply)


class ControlSocket:
    """The job's side, polled by a selector."""

    def __init__(self, name: str) -> None:
        check_name(name)
        self.name = name
        self._path = control_socket_at(runtime_directory(), name)
        if _answers(self._path):
            raise UsageError(
                f"a job named {name!r} is running already; give this one another name: --name NAME"
            )
        self._path.unlink(missing_ok=True)  # left behind by a job that was killed
        self.listener = bind_at(self._path)
        self.listener.listen()
        self.listener.setblocking(False)
        self._visitors: set[Connection] = set()

    def attend(
        self, selector: selectors.BaseSelector, on_request: Callable[[Request, Connection], None]
    ) -> None:
        """Have `selector` call us when somebody comes; what they ask for is told to `on_request`."""
        selector.register(self.listener, selectors.EVENT_READ, partial(self._welcome, selector, on_request))

    def _welcome(
        self, selector: selectors.BaseSelector, on_request: Callable[[Request, Connection], None]
    ) -> None:
        try:
            sock, _ = self.listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        connection = Connection(sock)
        self._visitors.add(connection)
        hear = partial(self._hear_out, selector, on_request, connection)
        selector.register(connection.channel, selectors.EVENT_READ, hear)

    def _hear_out(
        self,
        selector: selectors.BaseSelector,
        on_request: Callable[[Request, Connection], None],
        connection: Connection,
    ) -> None:
        try:
            requests = connection.channel.receive(wait=False)
        except (ProtocolError, OSError) as error:
            connection.answer(RequestResult(False, str(error)))
            requests = None
        if requests is None:
            selector.unregister(connection.channel)
            self._visitors.discard(connection)
            connection.channel.close()
        for request in requests or ():
            on_request(request, connection)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self.listener.close()
        for connection in self._visitors:
            connection.channel.close()


def _answers(path: Path) -> bool:
    """Whether somebody is behind that door."""
    try:
        connect_to(path).close()
    except OSError:
        return False
    return True


class Transport(Protocol):
    """How a request reaches a job."""

    def ask(self, request: Request) -> Reply: ...

    def close(self) -> None: ...


class JobClient:
    """A running job, by its name if it has an agent on this machine, or through `via`."""

    def __init__(self, name: str, via: Transport | None = None, at: Path | None = None) -> None:
        """`at`: the directory of its door, if that is not this user's own (`runtime_directory`)."""
        check_name(name)
        self.name = name
        self._transport = via or _Doors(name, at)

    def scale(self, workers: int, request: str | None = None) -> RequestResult:
        """Run on so many workers; returns when they train, or when it is clear that they will not."""
        return self._change(Scale(request or secrets.token_hex(8), workers))

    def scale_out(self, count: int = 1, request: str | None = None) -> RequestResult:
        """So many workers more."""
        return self._change(ScaleBy(request or secrets.token_hex(8), count))

    def scale_in(
        self, count: int | None = None, members: tuple[int, ...] = (), request: str | None = None
    ) -> RequestResult:
        """So many workers fewer: the last ones, or `members`."""
        count = len(members) or 1 if count is None else count
        return self._change(ScaleBy(request or secrets.token_hex(8), -count, members))

    def profile(
        self,
        smallest: int | None = None,
        largest: int | None = None,
        steps: int = 20,
        request: str | None = None,
    ) -> tuple[SizeMeasured, ...]:
        """Throughput and efficiency on all sizes from `smallest` to `largest`, or on the size that the job has.

        `steps` are measured on each. Returns when the job is back on the size that it had; raises `RequestFailed` if it
        cannot be.
        """
        reply = self._ask(ProfileJob(request or secrets.token_hex(8), smallest, largest, steps))
        if isinstance(reply, ProfileTable):
            return reply.rows
        assert isinstance(reply, RequestResult)
        raise RequestFailed(reply.text)

    def migrate(self, members: tuple[int, ...], request: str | None = None) -> RequestResult:
        """Replace these workers by new ones, in one switch."""
        return self._change(Migrate(request or secrets.token_hex(8), members))

    def occupy(self, slots: tuple[Slot, ...], request: str | None = None) -> RequestResult:
        """Run on exactly these devices."""
        return self._change(Occupy(request or secrets.token_hex(8), slots))

    def status(self) -> Status:
        reply = self._ask(AskStatus())
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
        """Have the job serve shards of `samples` samples under this name; every worker may say so. Raises `RequestFailed` if
        they
        are served with other values."""
        answer = self._change(OpenShards(queues, samples, shard_size, seed, shuffle, grain, lease_seconds))
        if not answer.done:
            raise RequestFailed(answer.text)

    def pull_shard(self, request: PullShard) -> Pulled:
        """Report what was trained, and get more."""
        reply = self._ask(request)
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


class _Doors:
    """The doors of a job on this machine: its own, or those of its agents. If one closes, the next is asked the same."""

    def __init__(self, name: str, at: Path | None) -> None:
        self._name, self._at = name, at
        self._channel = self._knock()

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
                self._channel = self._knock()
            except UsageError:
                raise UsageError(f"the job {self._name!r} ended before it answered") from None

    def _knock(self) -> Channel[Reply]:
        doors = self._at or runtime_directory()
        for path in (control_socket_at(doors, self._name), *sorted(doors.glob(f"{self._name}.*{_SUFFIX}"))):
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
