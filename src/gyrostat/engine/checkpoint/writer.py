"""Writes checkpoints in the background while training continues.

    1. `begin` copies the state, except what only an update changes; training is blocked meanwhile (`hostcopy.py`)
    2. a thread copies the rest; an update that comes earlier waits for it, in `settle` (`latecopy.py`)
    3. the thread writes the copy, syncs, renames it into place and removes old ones (`store.py`), then calls `done`
    4. `collect` returns the outcome, or raises the error

If a tensor was changed before it was copied late, the checkpoint is discarded, `invalidated` is called so that another one is
taken, and from then on everything is copied in `begin`.

Copying, hashing, writing and syncing release Python's lock, and from hashing on the thread has a low priority. One checkpoint
is written at a time (`schedule.py`). The thread lives only while it writes, and a process that ends waits for it.
"""

from __future__ import annotations

import contextlib
import logging
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
from gyrostat.engine.checkpoint.latecopy import CopyInvalidated, LateCopy
from gyrostat.engine.checkpoint.snapshot import FlatSnapshot, JobSnapshot, flatten_snapshot
from gyrostat.engine.checkpoint.store import CheckpointStore
from gyrostat.engine.state.flatcopy import size_of
from gyrostat.engine.state.statetree import flatten

logger = logging.getLogger(__name__)

THREAD = "gyrostat-checkpoint"
"""The name of the thread."""

_NICE = 10
"""The thread gets about a tenth of a core that training uses, and all of one that is idle."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint that is in place."""

    step: int
    path: Path
    blocked: float
    """Seconds for which training waited: at the boundary, and before the next update."""
    seconds: float
    """Seconds until it was in place."""


@dataclass(frozen=True, kw_only=True)
class Discarded:
    """A checkpoint that was not put in place, because it was not the state of its boundary."""

    step: int
    changed: str
    """The tensor that was changed."""


class Writer:
    """Writes one checkpoint at a time."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        done: Callable[[], None] = lambda: None,
        invalidated: Callable[[], None] = lambda: None,
    ) -> None:
        """`done` is the thread's last call, on success and on failure.

        `invalidated` is called before it if the checkpoint was discarded, and should be taken again. Both in the thread.
        """
        self._store, self._done, self._invalidated = store, done, invalidated
        self._copy = HostCopy()
        self._late: LateCopy | None = None  # until an update, or the end
        self._all_at_once = False
        self._preparing: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Written | Discarded | BaseException | None = None

    def prepare(self, shared: Any) -> None:
        """Allocate memory for a first checkpoint of about this shared state, in the background."""
        size = size_of(flatten(shared).skeleton)
        self._preparing = threading.Thread(target=self._prepare, args=(size,), name=f"{THREAD}-memory")
        self._preparing.start()

    def begin(self, snapshot: JobSnapshot, *, since: float, steady: Iterable[torch.Tensor] = ()) -> None:
        """Copy the snapshot and begin to write it. Training waits `since` this monotonic time.

        `steady`: tensors that the script does not change before it calls `settle`.
        """
        assert self._thread is None, "collect the last checkpoint first"
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        flat = flatten_snapshot(snapshot)
        self._late = late = self._copy.fill(flat, () if self._all_at_once else steady)
        blocked = time.monotonic() - since
        self._thread = threading.Thread(target=self._write, args=(flat, late, since, blocked), name=THREAD)
        self._thread.start()

    def settle(self) -> None:
        """Return when everything is copied. Called before an update."""
        late, self._late = self._late, None
        if late is not None:
            late.settle()

    def collect(self) -> Written | Discarded | None:
        """Wait for the checkpoint that is being written; None if there is none. Raises if it could not be written."""
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
        """Write a checkpoint without a copy and return when it is in place. For the end of training."""
        path = self._store.save(snapshot)
        seconds = time.monotonic() - since
        return Written(step=snapshot.progress.step, path=path, blocked=seconds, seconds=seconds)

    def _prepare(self, size: int) -> None:
        _lower_priority()
        self._copy.prepare(size)

    def _write(self, snapshot: FlatSnapshot, late: LateCopy, since: float, blocked: float) -> None:
        step = snapshot.progress.step
        try:
            late.complete()
            _lower_priority()  # only now: an update may have waited for the copy
            path = self._store.write(self._copy.copied(snapshot), confirm=late.require_exact)
            self._outcome = Written(
                step=step, path=path, blocked=blocked + late.waited, seconds=time.monotonic() - since
            )
        except CopyInvalidated as error:
            logger.info("checkpoint discarded: %r was changed", error.tensor, extra={"step": step})
            self._outcome = Discarded(step=step, changed=error.tensor)
            self._invalidated()
        except BaseException as error:
            self._outcome = error
        finally:
            self._done()


def _lower_priority() -> None:
    """Let training go first where cores are scarce. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
