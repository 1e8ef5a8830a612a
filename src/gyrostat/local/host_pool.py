"""Processes that can host a job (`host`), from the daemon's side. The `nursery` forks them in milliseconds; some are kept
ready.

A job goes to whichever host is ready first, and another takes that one's place. A host serves one job and ends. One that
nobody needs any more is let go: its standard input ends.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from gyrostat.local.host import HostCommand
from gyrostat.local.host_fork_server import HostForkServer

_FIRST_S, _LONGEST_S = 0.1, 30.0


class HostSource(Protocol):
    """Where hosts come from: a `nursery.Nursery`."""

    def alive(self) -> bool: ...

    def spawn(self, line: socket.socket) -> None:
        """Start a host with this as its standard input and output; it remains the caller's to close."""

    def end(self) -> None:
        """Hosts live on; those that have not been started yet never will be."""


class HostTask:
    """A job on its way to a host."""

    def __init__(self, work_item: HostCommand) -> None:
        self.work_item = work_item
        self.over = False
        """A host has had it, and has ended; or it was called off."""


class _Host:
    """One process, from the daemon's side: the line on which it is told of a job, and says when it is ready for one."""

    def __init__(self, source: HostSource) -> None:
        self._line, theirs = socket.socketpair()
        self.task: HostTask | None = None
        try:
            with theirs:
                source.spawn(theirs)
        except BrokenPipeError:
            pass  # nobody is left at the other end of the line: a host that has ended before it began
        except BaseException:
            self._line.close()
            raise

    def send(self, task: HostTask) -> bool:
        """False: it has ended."""
        try:
            self._line.sendall(msgspec.json.encode(task.work_item) + b"\n")
        except OSError:
            return False
        self.task = task
        return True

    def says_something(self) -> bool:
        """Waits until it does; False: it has ended."""
        try:
            return bool(self._line.recv(4096))
        except ConnectionResetError:  # it left without reading what it was told
            return False

    def let_go(self) -> None:
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def bury(self) -> None:
        self._line.close()
        if self.task is not None:
            self.task.over = True


class HostPool:
    """`spare` hosts are kept ready. May be used from any thread."""

    def __init__(
        self, log: Path, *, spare: int = 1, source: Callable[[Path], HostSource] = HostForkServer
    ) -> None:
        """`log`: to which hosts, and where they come from, say what is nobody's job's."""
        self._log, self._spare, self._open_source = log, spare, source
        self._source: HostSource | None = None
        self._changed = threading.Condition()
        self._waiting: deque[HostTask] = deque()
        self._starting: list[_Host] = []
        self._ready: list[_Host] = []
        self._busy: list[_Host] = []
        self._leaving: list[_Host] = []
        """Let go before they had a job, and not gone yet."""
        self._failures = 0
        """Hosts that could not be started, or died before they were ready, since one last was."""
        self._closed = False

    def fill(self) -> None:
        """As many as should be ready, or about to be."""
        with self._changed:
            while not self._closed and len(self._starting) + len(self._ready) < self._spare + len(
                self._waiting
            ):
                host = _Host(self._living_source())
                self._starting.append(host)
                threading.Thread(target=self._listen, args=(host,), name="host", daemon=True).start()

    def send(self, directory: Path, attempt: int) -> HostTask:
        """Have the next host that is ready take the job in this directory."""
        task = HostTask(HostCommand(str(directory), attempt))
        with self._changed:
            self._waiting.append(task)
            self._hand_out()
        try:
            self.fill()
        except OSError:
            if self.call_off(task):
                raise
        return task

    def call_off(self, task: HostTask) -> bool:
        """No host will take it. False: one has it already, or had it."""
        with self._changed:
            if task not in self._waiting:
                return False
            self._waiting.remove(task)
            task.over = True
            return True

    def await_ready(self, seconds: float) -> bool:
        """Whether a host is ready by then."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ready), seconds)

    def close(self) -> None:
        """Idle ones end; those that host a job go on without us."""
        with self._changed:
            self._closed = True
            ready = list(self._ready)
            for host in (*self._starting, *ready):
                self._dismiss(host)
            for host in self._busy:
                host.let_go()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not any(host in self._leaving for host in ready))
            if self._source is not None:
                self._source.end()
            self._changed.wait_for(lambda: not self._leaving)

    def _living_source(self) -> HostSource:
        if self._source is not None and not self._source.alive():
            self._source.end()
            self._source = None
        if self._source is None:
            self._source = self._open_source(self._log)
        return self._source

    def _hand_out(self) -> None:
        while self._waiting and self._ready:
            host = self._ready.pop()
            if host.send(self._waiting[0]):
                self._waiting.popleft()
                self._busy.append(host)

    def _dismiss(self, host: _Host) -> None:
        self._drop(host)
        self._leaving.append(host)
        host.let_go()

    def _listen(self, host: _Host) -> None:
        """It says `ready` when it can take a job; when it says nothing more, it has ended."""
        while host.says_something():
            with self._changed:
                self._is_ready(host)
                self._changed.notify_all()
        with self._changed:
            self._failures += host in self._starting
            self._drop(host)
            host.bury()
            self._changed.notify_all()
        self._replace()

    def _is_ready(self, host: _Host) -> None:
        self._failures = 0
        if host not in self._starting:
            return
        self._starting.remove(host)
        self._ready.append(host)
        self._hand_out()
        if len(self._ready) > self._spare:
            self._dismiss(self._ready[-1])

    def _replace(self) -> None:
        """Whoever waits for a host that has died gets another. If none lives long enough to be ready, that takes longer
        each time."""
        while True:
            with self._changed:
                patience = min(_FIRST_S * 2.0**self._failures, _LONGEST_S) if self._failures else 0.0
                if self._changed.wait_for(lambda: self._closed, patience):
                    return
            try:
                self.fill()
                return
            except OSError:
                with self._changed:
                    self._failures += 1

    def _drop(self, host: _Host) -> None:
        for hosts in (self._starting, self._ready, self._busy, self._leaving):
            if host in hosts:
                hosts.remove(host)
