"""The control socket of a running job: a Unix socket through which other processes of the same user send it `requests`.

Frames are msgspec messages. Sockets live in a directory that only this user may enter, so a process that can open one may also
send requests. `ControlSocket` is the job's side, polled by its event loop; `client.JobClient` is the other side, and blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import selectors
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from gyrostat.core.errors import UsageError
from gyrostat.job import environment
from gyrostat.job.control.requests import Reply, Request, RequestResult
from gyrostat.job.processes.channel import Channel, ProtocolError
from gyrostat.job.processes.unix_socket import bind_at, connect_to

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SUFFIX = ".socket"


def runtime_directory() -> Path:
    """The directory of the sockets; only this user may enter it."""
    base = environment.runtime_base()
    path = Path(base) / "gyrostat" if base else Path(f"/tmp/gyrostat-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the directory {path} cannot be made: {error.strerror}; set GYROSTAT_RUNTIME_DIR to another place"
        ) from error
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{path} must be a directory that only you may enter (owner {os.getuid()}, mode 700); remove it, or set "
            "GYROSTAT_RUNTIME_DIR to another place"
        )
    return path


def control_socket_at(directory: Path, name: str) -> Path:
    """The path of a job's control socket."""
    return directory / f"{name}{SUFFIX}"


def running(directory: Path | None = None) -> list[str]:
    """The names of running jobs and agents. The sockets of those that were killed are removed."""
    directory = directory or runtime_directory()
    found = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with _locked(directory):
            if _is_served(path):
                found.append(path.name.removesuffix(SUFFIX))
            else:
                path.unlink(missing_ok=True)
    return found


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Sockets are made and removed under a lock: one that is bound and not yet listening looks like that of a dead job."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_name(name: str) -> None:
    if not NAMES.fullmatch(name):
        raise UsageError(
            f"a job's name is made of up to 64 letters, digits, dots, dashes and underscores; got {name!r}"
        )


class Connection:
    """A client that is connected."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel: Channel[Request] = Channel(sock, Request)

    def answer(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):  # it has disconnected
            self.channel.send(reply)


class ControlSocket:
    """The job's side, polled by a selector."""

    def __init__(self, name: str) -> None:
        check_name(name)
        self.name = name
        self._path = control_socket_at(runtime_directory(), name)
        with _locked(self._path.parent):
            if _is_served(self._path):
                raise UsageError(
                    f"a job named {name!r} is running already; give this one another name: --name NAME"
                )
            self._path.unlink(missing_ok=True)  # left behind by a job that was killed
            self.listener = bind_at(self._path)
            self.listener.listen()
        self.listener.setblocking(False)
        self._connections: set[Connection] = set()

    def register(
        self, selector: selectors.BaseSelector, on_request: Callable[[Request, Connection], None]
    ) -> None:
        """Register with `selector`; requests are passed to `on_request`."""
        selector.register(self.listener, selectors.EVENT_READ, partial(self._accept, selector, on_request))

    def _accept(
        self, selector: selectors.BaseSelector, on_request: Callable[[Request, Connection], None]
    ) -> None:
        try:
            sock, _ = self.listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        connection = Connection(sock)
        self._connections.add(connection)
        receive = partial(self._receive, selector, on_request, connection)
        selector.register(connection.channel, selectors.EVENT_READ, receive)

    def _receive(
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
            self._connections.discard(connection)
            connection.channel.close()
        for request in requests or ():
            on_request(request, connection)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self.listener.close()
        for connection in self._connections:
            connection.channel.close()


def _is_served(path: Path) -> bool:
    """Whether a process listens at this socket."""
    try:
        connect_to(path).close()
    except OSError:
        return False
    return True
