"""Signals to the launcher as something its loop can wait for. Only the command line asks for this, never a
library use.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class SignalQueue:
    """Signals that arrived and were not yet taken; `fileno()` is readable when there are some."""

    def __init__(self) -> None:
        self._reader, self.writer = socket.socketpair()
        self._reader.setblocking(False)
        self.writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            return [number for number in self._reader.recv(256) if number in PASSED_ON]
        return []

    def close(self) -> None:
        self._reader.close()
        self.writer.close()


@contextlib.contextmanager
def caught() -> Iterator[SignalQueue]:
    """While this lasts, the signals of PASSED_ON queue up instead of doing what they usually do."""

    def leave_it_to_the_queue(number: int, frame: FrameType | None) -> None:
        pass

    queue = SignalQueue()
    before_fd = signal.set_wakeup_fd(queue.writer.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, leave_it_to_the_queue) for number in PASSED_ON}
    try:
        yield queue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        queue.close()
