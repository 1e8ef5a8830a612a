"""Processes that can host a job (`host`), from the daemon's side. `host_fork_server` forks them in milliseconds; some are
kept ready.

A job is assigned to the first host that is ready, and another host takes the place of that one. A host serves one job and
ends. A host that is not needed any more is released: its standard input ends.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from gyrostat.core.backoff import Backoff
from gyrostat.local.environment import job_environment, variables
from gyrostat.local.host import HostCommand
from gyrostat.local.host_fork_server import HostForkServer

_RESTART_DELAY = Backoff(first_s=0.2, longest_s=30.0)
logger = logging.getLogger(__name__)


class HostSource(Protocol):
    """Starts hosts: a `HostForkServer`."""

    def alive(self) -> bool: ...

    def spawn(self, line: socket.socket) -> None:
        """Start a host with this socket as its standard input and output. The caller closes the socket."""

    def end(self) -> None:
        """Hosts go on; those that have not been started yet never will be."""


class HostTaskState(StrEnum):
    """QUEUED → ASSIGNED → OVER, or QUEUED → OVER if it is cancelled."""

    QUEUED = "queued"
    ASSIGNED = "assigned"
    OVER = "over"


class HostTask:
    """A job on its way to a host. Its state is changed by the pool only."""

    def __init__(self, command: HostCommand) -> None:
        self.command = command
        self._changed = threading.Condition()
        self._state = HostTaskState.QUEUED

    @property
    def state(self) -> HostTaskState:
        return self._state

    def enter(self, state: HostTaskState) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def wait(self, state: HostTaskState, seconds: float) -> bool:
        """Whether it is in this state after at most `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state is state, seconds)


class _Host:
    """One process, from the daemon's side: the socket through which it reports that it is ready, and receives a command."""

    def __init__(self, source: HostSource) -> None:
        self._line, theirs = socket.socketpair()
        self._task: HostTask | None = None
        try:
            with theirs:
                source.spawn(theirs)
        except BrokenPipeError:
            pass  # the other end is closed: the same as a host that ends before it is ready
        except BaseException:
            self._line.close()
            raise

    def assign(self, task: HostTask) -> bool:
        """False: it has ended."""
        try:
            self._line.sendall(msgspec.json.encode(task.command) + b"\n")
        except OSError:
            return False
        self._task = task
        task.enter(HostTaskState.ASSIGNED)
        return True

    def await_output(self) -> bool:
        """Wait until it writes something; False: it has ended."""
        try:
            return bool(self._line.recv(4096))
        except ConnectionResetError:  # it ended without reading its command
            return False

    def release(self) -> None:
        """It ends, or finishes its job on its own."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """After its end."""
        self._line.close()
        if self._task is not None:
            self._task.enter(HostTaskState.OVER)


class HostPool:
    """`spare` hosts are kept ready. May be used from any thread."""

    def __init__(
        self, log: Path, *, spare: int = 1, source: Callable[[Path], HostSource] | None = None
    ) -> None:
        """`log`: for messages of hosts and of the fork server that belong to no job. `source` opens another fork server than
        one whose jobs inherit what they always do."""
        self._log, self._spare = log, spare
        self._open_source = source or (lambda log: HostForkServer(log, job_environment(variables())))
        self._source: HostSource | None = None
        self._changed = threading.Condition()
        self._queue: deque[HostTask] = deque()
        self._starting: list[_Host] = []
        self._ready: list[_Host] = []
        self._busy: list[_Host] = []
        self._leaving: list[_Host] = []
        """Released before they had a job, and not ended yet."""
        self._failures = 0
        """Hosts that could not be started, or ended before they were ready, since one last was."""
        self._closed = False

    def fill(self) -> None:
        """Start hosts until enough are ready or starting."""
        with self._changed:
            while not self._closed and len(self._starting) + len(self._ready) < self._spare + len(
                self._queue
            ):
                host = _Host(self._living_source())
                self._starting.append(host)
                threading.Thread(target=self._watch, args=(host,), name="host", daemon=True).start()

    def send(self, directory: Path, attempt: int) -> HostTask:
        """Have the next host that is ready run the job in this directory."""
        task = HostTask(HostCommand(str(directory), attempt))
        with self._changed:
            self._queue.append(task)
            self._assign()
        try:
            self.fill()
        except OSError:
            if self.cancel(task):
                raise
        return task

    def cancel(self, task: HostTask) -> bool:
        """No host will take it. False: a host has or had it."""
        with self._changed:
            if task not in self._queue:
                return False
            self._queue.remove(task)
            task.enter(HostTaskState.OVER)
            return True

    def await_ready(self, seconds: float, hosts: int = 1) -> bool:
        """Whether this many hosts are ready after at most `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._ready) >= hosts, seconds)

    def close(self) -> None:
        """Idle hosts end; those that run a job go on. Returns when idle hosts have ended."""
        with self._changed:
            self._closed = True
            ready = list(self._ready)
            for host in (*self._starting, *ready):
                self._dismiss(host)
            for host in self._busy:
                host.release()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not any(host in self._leaving for host in ready))
            if self._source is not None:
                self._source.end()
            self._changed.wait_for(lambda: not self._leaving)

    def _living_source(self) -> HostSource:
        if self._source is not None and not self._source.alive():
            logger.warning("the host fork server has ended; another is started")
            self._source.end()
            self._source = None
        if self._source is None:
            self._source = self._open_source(self._log)
        return self._source

    def _assign(self) -> None:
        while self._queue and self._ready:
            host = self._ready.pop()
            if host.assign(self._queue[0]):
                task = self._queue.popleft()
                self._busy.append(host)
                job = Path(task.command.directory).name
                logger.info("a host takes attempt %d", task.command.attempt, extra={"job": job})

    def _dismiss(self, host: _Host) -> None:
        self._remove(host)
        self._leaving.append(host)
        host.release()

    def _watch(self, host: _Host) -> None:
        """It writes `ready` when it can take a job; when nothing more comes, it has ended."""
        while host.await_output():
            with self._changed:
                self._is_ready(host)
                self._changed.notify_all()
        with self._changed:
            self._failures += host in self._starting
            self._remove(host)
            host.close()
            self._changed.notify_all()
        self._replace()

    def _is_ready(self, host: _Host) -> None:
        self._failures = 0
        if host not in self._starting:
            return
        self._starting.remove(host)
        self._ready.append(host)
        self._assign()
        if len(self._ready) > self._spare:
            self._dismiss(self._ready[-1])

    def _replace(self) -> None:
        """Start another host for the one that has ended, if one is needed. While none becomes ready, the pause doubles."""
        while True:
            with self._changed:
                pause = _RESTART_DELAY.after(self._failures)
                if self._changed.wait_for(lambda: self._closed, pause):
                    return
            try:
                self.fill()
                return
            except OSError:
                with self._changed:
                    self._failures += 1

    def _remove(self, host: _Host) -> None:
        for hosts in (self._starting, self._ready, self._busy, self._leaving):
            if host in hosts:
                hosts.remove(host)
