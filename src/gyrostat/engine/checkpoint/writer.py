"""Writes checkpoints behind the training that goes on.

    1. `begin` copies the state: so long training is blocked (hostcopy.py)
    2. a thread writes the copy, syncs, renames it into place and removes old ones (store.py), then calls `done`
    3. `collect` returns what became of it, or raises why it failed

Hashing, writing and syncing leave the interpreter to the training thread, and the thread's low priority leaves it the
core. One is written at a time; turns.py sees to it. The thread lives only while it writes, and a process that ends waits
for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyrostat.engine.checkpoint.hostcopy import HostCopy
from gyrostat.engine.checkpoint.snapshot import FlatSnapshot, Snapshot, take_apart
from gyrostat.engine.checkpoint.store import CheckpointStore

THREAD = "gyrostat-checkpoint"
"""The name of the thread."""

_NICE = 10
"""A tenth of a core, roughly, where training wants all of it; a whole one where there is one to spare."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint that is in place."""

    step: int
    path: Path
    blocked: float
    """Seconds for which training stood still."""
    seconds: float
    """Seconds until it was in place."""


class Writer:
    """Writes one checkpoint at a time."""

    def __init__(self, store: CheckpointStore, *, done: Callable[[], None] = lambda: None) -> None:
        """`done` is called in the thread, as the last thing it does, whether it succeeded or not."""
        self._store, self._done = store, done
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._outcome: Written | BaseException | None = None

    def begin(self, snapshot: Snapshot, *, since: float) -> None:
        """Copy and return; the copy is written behind. Training has stood still `since` this monotonic time."""
        assert self._thread is None, "one at a time: collect the last one first"
        copy = self._copy.fill(take_apart(snapshot))
        blocked = time.monotonic() - since
        self._thread = threading.Thread(target=self._write, args=(copy, since, blocked), name=THREAD)
        self._thread.start()

    def collect(self) -> Written | None:
        """Wait for the one that is being written. None if there is none; raises if it could not be written."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def write_now(self, snapshot: Snapshot, *, since: float) -> Written:
        """Write one and return when it is in place: for the end, when nothing goes on and nothing need be copied."""
        path = self._store.save(snapshot)
        seconds = time.monotonic() - since
        return Written(step=snapshot.progress.step, path=path, blocked=seconds, seconds=seconds)

    def _write(self, copy: FlatSnapshot, since: float, blocked: float) -> None:
        try:
            _step_back()
            path = self._store.write(copy)
            self._outcome = Written(
                step=copy.progress.step, path=path, blocked=blocked, seconds=time.monotonic() - since
            )
        except BaseException as error:
            self._outcome = error
        finally:
            self._done()


def _step_back() -> None:
    """Let training go first where cores are scarce. On Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
