"""A worker's stack, without its help: a signal, upon which the interpreter's fault handler writes to a file.

The handler is C, runs at once, and needs no lock of the interpreter's: a worker that is stuck in C code answers, too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

SIGNAL = signal.SIGUSR2


def answer_at(path: Path) -> None:
    """In the worker: from now on SIGNAL has the stacks of all threads written there."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file, all_threads=True)


class StackFile:
    """What a worker writes that is about to be sent SIGNAL."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, 0
        with contextlib.suppress(OSError):
            os.truncate(path, 0)

    def look(self) -> str | None:
        """The stacks, when there are some, and no more than at the last look; None: look again."""
        try:
            text = self._path.read_text(errors="replace")
        except OSError:
            return None
        before, self._seen = self._seen, len(text)
        return text.strip() if 0 < before == len(text) else None
