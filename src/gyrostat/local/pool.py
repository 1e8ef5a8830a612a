"""Processes that can host a job (`host`): some are kept ready, for importing everything takes seconds.

A job goes to whichever host is ready first. One that has finished a job takes the next. Those that nobody needs are let go:
their standard input ends.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import msgspec

from gyrostat.local.host import Errand

_FIRST_S, _LONGEST_S = 0.1, 30.0


class Dispatch:
    """A job on its way to a host."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self.over = False
        """A host has had it, and has come back or died; or it was called off."""


class _Host:
    """One process, from the daemon's side."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gyrostat.local.host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        self.dispatch: Dispatch | None = None

    def come_back(self) -> None:
        if self.dispatch is not None:
            self.dispatch.over, self.dispatch = True, None

    def send(self, errand: Errand) -> bool:
        """False: it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(errand) + b"\n")
            self.process.stdin.flush()
        except OSError:
            return False
        return True

    def let_go(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class HostPool:
    """`spare` hosts are kept ready. May be used from any thread."""

    def __init__(self, log: Path, *, spare: int = 1) -> None:
        self._log, self._spare = log, spare
        self._changed = threading.Condition()
        self._waiting: deque[Dispatch] = deque()
        self._starting: list[_Host] = []
        self._ready: list[_Host] = []
        self._busy: list[_Host] = []
        self._failures = 0
        """Hosts that could not be started, or died before they were ready, since one last was."""
        self._closed = False

    def fill(self) -> None:
        """As many as should be ready, or about to be."""
        with self._changed:
            while not self._closed and len(self._starting) + len(self._ready) < self._spare + len(
                self._waiting
            ):
                host = _Host(self._log)
                self._starting.append(host)
                threading.Thread(target=self._listen, args=(host,), name="host", daemon=True).start()

    def send(self, directory: Path, attempt: int) -> Dispatch:
        """Have the next host that is ready take the job in this directory."""
        dispatch = Dispatch(Errand(str(directory), attempt))
        with self._changed:
            self._waiting.append(dispatch)
            self._hand_out()
        try:
            self.fill()
        except OSError:
            if self.call_off(dispatch):
                raise
        return dispatch

    def call_off(self, dispatch: Dispatch) -> bool:
        """No host will take it. False: one has it already, or had it."""
        with self._changed:
            if dispatch not in self._waiting:
                return False
            self._waiting.remove(dispatch)
            dispatch.over = True
            return True

    def await_ready(self, seconds: float) -> bool:
        """Whether a host is ready by then."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ready), seconds)

    def close(self) -> None:
        """Idle ones end; those that host a job go on without us."""
        with self._changed:
            self._closed = True
            idle = [*self._starting, *self._ready]
            for host in (*idle, *self._busy):
                host.let_go()
            self._changed.notify_all()
        for host in idle:
            host.process.wait()

    def _hand_out(self) -> None:
        while self._waiting and self._ready:
            host = self._ready.pop()
            if host.send(self._waiting[0].errand):
                self._busy.append(host)
                host.dispatch = self._waiting.popleft()

    def _listen(self, host: _Host) -> None:
        """It says `ready` when it can take a job; when it says nothing more, it has ended."""
        stdout = host.process.stdout
        assert stdout is not None
        with stdout:
            for _ in stdout:
                with self._changed:
                    self._failures = 0
                    self._drop(host)
                    if self._closed or (len(self._ready) >= self._spare and not self._waiting):
                        host.let_go()
                    else:
                        self._ready.append(host)
                        self._hand_out()
                    self._changed.notify_all()
        host.process.wait()
        host.let_go()
        with self._changed:
            self._failures += host in self._starting
            self._drop(host)
            self._changed.notify_all()
        self._replace()

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
        host.come_back()
        for hosts in (self._starting, self._ready, self._busy):
            if host in hosts:
                hosts.remove(host)
