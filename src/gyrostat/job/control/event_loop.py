"""The event loop of a process that runs workers: an agent, or `gyrostat run` on one machine.

    1. wait until a worker reports, prints or exits, a request or a signal arrives, another thread posts a call, or a deadline
       passes
    2. take in what has arrived

The owner handles events through callbacks; all of them are called in one thread.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path

from gyrostat.job.control.control_socket import Connection, ControlSocket
from gyrostat.job.control.requests import Request
from gyrostat.job.processes.output import LogFiles
from gyrostat.job.processes.signals import SignalQueue
from gyrostat.job.processes.start import WorkerSource
from gyrostat.job.processes.worker_pool import WorkerListener, WorkerPool


class Inbox:
    """Calls that other threads post to the loop, in order."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def post(self, call: Callable[[], None]) -> None:
        """From any thread."""
        self._calls.put(call)
        with contextlib.suppress(OSError):  # full: the loop wakes up anyway; closed: the loop has ended
            self._writer.send(b"!")

    def fileno(self) -> int:
        return self._reader.fileno()

    def work_off(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(1 << 12)
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Loop:
    def __init__(
        self,
        source: WorkerSource,
        events: WorkerListener,
        *,
        on_signal: Callable[[int], None],
        on_request: Callable[[Request, Connection], None],
        boxes: Path,
        signals: SignalQueue | None = None,
        control_socket: ControlSocket | None = None,
        logs: LogFiles | None = None,
        agent_socket: Path | None = None,
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._on_signal, self._signals, self._control_socket = on_signal, signals, control_socket
        self.inbox = Inbox()
        self._selector.register(self.inbox, selectors.EVENT_READ, self.inbox.work_off)
        if signals is not None:
            self._selector.register(signals, selectors.EVENT_READ, self._take_signals)
        if control_socket is not None:
            control_socket.register(self._selector, on_request)
        self.workers = WorkerPool(source, self._selector, events, boxes, logs, agent_socket)

    @property
    def selector(self) -> selectors.BaseSelector:
        """For further files. Their data is called, without arguments, when they are ready."""
        return self._selector

    def turn(self, *deadlines: float | None) -> None:
        """Wait for events until the first of the deadlines (of the monotonic clock), and take them in."""
        files, now = self.workers.read_files(), time.monotonic()
        waits = [max(0.0, deadline - now) for deadline in deadlines if deadline is not None]
        timeout = min(waits if files is None else [*waits, files], default=None)
        for key, _ in self._selector.select(timeout):
            key.data()
        self.workers.take_exits()

    def _take_signals(self) -> None:
        assert self._signals is not None
        for number in self._signals.take():
            self._on_signal(number)

    def close(self) -> None:
        """End all workers, and close all connections."""
        try:
            self.workers.close()
        finally:
            self._selector.close()
            self.inbox.close()
            if self._control_socket is not None:
                self._control_socket.close()
