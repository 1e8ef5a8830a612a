"""Writes checkpoints behind the training that goes on.

    1. `begin` copies the state, but for what only an update changes: so long training is blocked (hostcopy.py)
    2. a thread copies the rest; an update that comes before it is done waits, in `settle` (latecopy.py)
    3. the thread writes the copy, syncs, renames it into place and removes old ones (store.py), then calls `done`
    4. `collect` returns what became of it, or raises why it failed

Somebody may have changed what was to be copied late. Then nothing is put in place, another one is asked for (`spoiled`), and
from then on everything is copied at once.

Copying, hashing, writing and syncing leave the interpreter to the training thread, and from hashing on the thread's low
priority leaves it the core. One is written at a time; turns.py sees to it. The thread lives only while it writes, and a
process that ends waits for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gyrostat.engine.checkpoint.hostcopy import HostCopy
from gyrostat.engine.checkpoint.latecopy import LateCopy, Spoiled
from gyrostat.engine.checkpoint.snapshot import FlatSnapshot, JobSnapshot, take_apart
from gyrostat.engine.checkpoint.store import CheckpointStore
from gyrostat.engine.state.flatcopy import room_for
from gyrostat.engine.state.statetree import flatten

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
    """Seconds for which training stood still: at the boundary, and before the next update."""
    seconds: float
    """Seconds until it was in place."""


@dataclass(frozen=True, kw_only=True)
class Discarded:
    """A checkpoint that was not put in place: it would not have been the state of its boundary."""

    step: int
    changed: str
    """The tensor that somebody changed."""


class Writer:
    """Writes one checkpoint at a time."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        done: Callable[[], None] = lambda: None,
        spoiled: Callable[[], None] = lambda: None,
    ) -> None:
        """`done` is called in the thread, as the last thing it does, whether it succeeded or not.

        `spoiled` is called before that if the checkpoint was discarded, and should be taken again.
        """
        self._store, self._done, self._spoiled = store, done, spoiled
        self._copy = HostCopy()
        self._late: LateCopy | None = None  # until an update, or the end
        self._all_at_once = False
        self._preparing: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Written | Discarded | BaseException | None = None

    def prepare(self, shared: Any) -> None:
        """One of about this shared state is to come, the first: have memory made ready for it behind training."""
        size = room_for(flatten(shared).skeleton)
        self._preparing = threading.Thread(target=self._prepare, args=(size,), name=f"{THREAD}-memory")
        self._preparing.start()

    def begin(self, snapshot: JobSnapshot, *, since: float, steady: Iterable[torch.Tensor] = ()) -> None:
        """Copy and return; the copy is written behind. Training has stood still `since` this monotonic time.

        `steady`: what nobody is going to change before he calls `settle`.
        """
        assert self._thread is None, "one at a time: collect the last one first"
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        flat = take_apart(snapshot)
        self._late = late = self._copy.fill(flat, () if self._all_at_once else steady)
        blocked = time.monotonic() - since
        self._thread = threading.Thread(target=self._write, args=(flat, late, since, blocked), name=THREAD)
        self._thread.start()

    def settle(self) -> None:
        """Training is about to make an update: return when everything has been copied."""
        late, self._late = self._late, None
        if late is not None:
            late.settle()

    def collect(self) -> Written | Discarded | None:
        """Wait for the one that is being written. None if there is none; raises if it could not be written."""
        if self._thread is None:
            return None
        self.settle()
        self._thread.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        self._all_at_once |= isinstance(outcome, Discarded)
        return outcome

    def write_now(self, snapshot: JobSnapshot, *, since: float) -> Written:
        """Write one and return when it is in place: for the end, when nothing goes on and nothing need be copied."""
        path = self._store.save(snapshot)
        seconds = time.monotonic() - since
        return Written(step=snapshot.progress.step, path=path, blocked=seconds, seconds=seconds)

    def _prepare(self, size: int) -> None:
        _step_back()
        self._copy.prepare(size)

    def _write(self, snapshot: FlatSnapshot, late: LateCopy, since: float, blocked: float) -> None:
        step = snapshot.progress.step
        try:
            late.complete()
            _step_back()  # only now: an update may have waited for the copy
            path = self._store.write(self._copy.of(snapshot), confirm=late.require_exact)
            self._outcome = Written(
                step=step, path=path, blocked=blocked + late.waited, seconds=time.monotonic() - since
            )
        except Spoiled as spoiled:
            self._outcome = Discarded(step=step, changed=spoiled.tensor)
            self._spoiled()
        except BaseException as error:
            self._outcome = error
        finally:
            self._done()


def _step_back() -> None:
    """Let training go first where cores are scarce. On Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
