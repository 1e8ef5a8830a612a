"""The stacks of a worker's threads: upon a signal, the interpreter's fault handler writes them to a file.

The handler is C code, runs at once, and needs no lock of the interpreter, so it works also in a worker that hangs in C code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

SIGNAL = signal.SIGUSR2


def dump_on_signal(path: Path) -> None:
    """In the worker: from now on SIGNAL appends the stacks of all threads to `path`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file, all_threads=True)


class StackFile:
    """In the agent: the file that a worker writes upon SIGNAL. Create it before sending the signal."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, 0
        with contextlib.suppress(OSError):
            os.truncate(path, 0)

    def read(self) -> str | None:
        """The stacks, once the file did not grow between two calls; None: call again later."""
        try:
            text = self._path.read_text(errors="replace")
        except OSError:
            return None
        before, self._seen = self._seen, len(text)
        return text.strip() if 0 < before == len(text) else None
