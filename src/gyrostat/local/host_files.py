"""What the daemon and the host of a job exchange through the job's directory.

    order.json       what to run, for which attempt; written by the daemon before a host is assigned
    host.lock        locked by the host while it has the job, and released with it however it ends
    host.json        that process, and the fork server of its workers
    result-N.json    the result of attempt N; written by the host before it releases the lock
    logs/            output.log, host.log, metrics.jsonl, curves.jsonl
    checkpoints/     of the job

Only the lock decides whether a job has a host, never a process id, so a job has at most one. An attempt is made at most once:
a host that comes late finds another attempt ordered, or a result, and ends. So the daemon may be killed at any moment: the
next one adopts jobs whose lock is held, through their control sockets; the others have a result, or died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from gyrostat.cluster.attempt import AttemptResult
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.core.files import write_atomically
from gyrostat.job.control.device_assignment import Slot

_ORDER, _LOCK, _HOST = "order.json", "host.lock", "host.json"
CHECKPOINTS, LOGS = "checkpoints", "logs"
_LOCK_TIMEOUT_S = 1.0


class HostOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Run this job, on these devices to begin with."""

    job: str
    attempt: int
    spec: JobSpec
    slots: tuple[Slot, ...]
    sockets: str
    """The directory of its control socket."""
    beneath: tuple[tuple[str, ...], ...] = ()
    """Directories below which its working directory and script must lie when it starts."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process, distinguished from a later one with the same id."""

    pid: int
    started: int
    """Clock ticks between boot and its start."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        started = _start_time(pid)
        return None if started is None else cls(pid, started)

    def alive(self) -> bool:
        return _start_time(self.pid) == self.started

    def end(self, number: int = signal.SIGKILL, timeout_s: float = 0.0) -> bool:
        """Send it a signal, unless it is another process by now; returns whether it has ended after `timeout_s` seconds."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive():
                return True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
            gone = select.poll()
            gone.register(pidfd, select.POLLIN)
            return bool(gone.poll(timeout_s * 1000))
        finally:
            os.close(pidfd)


class HostFile(msgspec.Struct, frozen=True, kw_only=True):
    """The process that hosts a job, or did so last."""

    attempt: int
    host: ProcessIdentity
    parent: ProcessIdentity | None
    """The fork server of its workers."""


# The daemon's side.


def write_order(directory: Path, order: HostOrder) -> None:
    """Durable when this returns."""
    (directory / LOGS).mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(directory / _ORDER, msgspec.json.encode(order))


def read_result(directory: Path, attempt: int) -> AttemptResult | None:
    return _read(directory / _result(attempt), AttemptResult)


def read_host(directory: Path) -> HostFile | None:
    return _read(directory / _HOST, HostFile)


def read_order(directory: Path) -> HostOrder | None:
    return _read(directory / _ORDER, HostOrder)


def last_sign_of_life(directory: Path) -> float | None:
    """When the job's host or workers last wrote to a file, in seconds since the epoch; None: never."""
    written = [*directory.glob(f"{LOGS}/*"), *directory.glob(_result("*"))]
    return max((path.stat().st_mtime for path in written), default=None)


def is_hosted(directory: Path) -> bool:
    """Whether a process holds the job's lock."""
    try:
        with (directory / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def end_fork_server(host: HostFile) -> None:
    """End the fork server of a host that was killed, and with it the workers and what they have started."""
    if host.parent is not None:
        host.parent.end(signal.SIGTERM, timeout_s=2.0) or host.parent.end(signal.SIGKILL, timeout_s=2.0)


# The host's side.


@contextlib.contextmanager
def holding(directory: Path) -> Iterator[bool]:
    """Hold the job's lock during the block. False: another process holds it."""
    with (directory / _LOCK).open("ab") as file:
        yield _lock(file)


def is_due(directory: Path, order: HostOrder, attempt: int) -> bool:
    """Whether this attempt is ordered and was not made."""
    return order.attempt == attempt and not (directory / _result(attempt)).exists()


def register_host(directory: Path, attempt: int, parent: int) -> None:
    """Write this process to `host.json`. The fork server of a previous host that was killed is ended first."""
    before = read_host(directory)
    if before is not None and before.parent is not None and not before.host.alive():
        end_fork_server(before)
    host = ProcessIdentity.of(os.getpid())
    assert host is not None
    file = HostFile(attempt=attempt, host=host, parent=ProcessIdentity.of(parent))
    write_atomically(directory / _HOST, msgspec.json.encode(file))


def write_result(directory: Path, result: AttemptResult) -> None:
    write_atomically(directory / _result(result.attempt), msgspec.json.encode(result))


# Implementation.


def _lock(file: IO[bytes]) -> bool:
    """False: another process has it, and not only for the moment of an `is_hosted`."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def _result(attempt: int | str) -> str:
    return f"result-{attempt}.json"


T = TypeVar("T")


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _start_time(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
