"""Files of slots are written and read by a thread, while the loop serves requests."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable


class FileThread:
    """Runs tasks one after the other in a thread. What each of them returns is called in the loop's thread."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self.pending = 0
        """Tasks that are not done yet."""
        threading.Thread(target=self._run, daemon=True, name="files").start()

    def fileno(self) -> int:
        return self._reader.fileno()

    def post(self, task: Callable[[], Callable[[], None]]) -> None:
        self.pending += 1
        self._tasks.put(task)

    def take_done(self) -> None:
        """In the loop's thread, when the socket is readable."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                done = self._done.get_nowait()
                self.pending -= 1
                done()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._done.put(task())
            self._writer.send(b"!")

    def close(self) -> None:
        self._tasks.put(None)
