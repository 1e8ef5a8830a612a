"""Files of slots: one safetensors file each, written and read by a thread while the loop serves requests.

A file has a name of its own, and counts only when a manifest names it: nothing has to be renamed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from gyrostat.core.errors import MalformedState
from gyrostat.ps.store.slot_state import SlotState, parse_slot_state

_AT_ONCE = 1 << 22


def write_slot(path: Path, state: SlotState) -> None:
    """Write a file, on disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for part in state.parts():
            data = part.cast("B")
            for start in range(0, len(data), _AT_ONCE):
                left = data[start : start + _AT_ONCE]
                while len(left):
                    left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def read_slot(path: Path) -> SlotState:
    """A slot whose arrays are views of the file. Raises `MalformedState` or `OSError`."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise MalformedState(f"{path} is empty")
        return parse_slot_state(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


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
