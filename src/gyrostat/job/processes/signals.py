"""Signals to the launcher as a file that its event loop can poll. Only the command line uses this, not the library."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class SignalQueue:
    """Signals that arrived and were not yet taken; `fileno()` is readable when there are any."""

    def __init__(self) -> None:
        self._reader, self.writer = socket.socketpair()
        self._reader.setblocking(False)
        self.writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            return [number for number in self._reader.recv(256) if number in FORWARDED]
        return []

    def close(self) -> None:
        self._reader.close()
        self.writer.close()


@contextlib.contextmanager
def caught() -> Iterator[SignalQueue]:
    """In this context the signals of FORWARDED are queued instead of having their usual effect."""

    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    queue = SignalQueue()
    before_fd = signal.set_wakeup_fd(queue.writer.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, ignore) for number in FORWARDED}
    try:
        yield queue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        queue.close()
