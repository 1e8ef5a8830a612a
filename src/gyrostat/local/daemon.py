"""The daemon of a cluster on this machine: it owns the state directory, runs the loop, and keeps house.

1. lock the state directory           (or say who has it)
2. open the database, and find the jobs that run
3. run the one loop of `sched` in a thread, recorded
4. keep house until somebody asks it to end: forget old jobs, write what a full disk did not take
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from gyrostat.cluster.layout import ClusterLayout
from gyrostat.cluster.registry import Registry
from gyrostat.cluster.service import ClusterService
from gyrostat.core.errors import GyrostatError, StorageFull, UsageError
from gyrostat.core.plan import Plan
from gyrostat.local.backend import LocalBackend
from gyrostat.local.cluster import Closed, LocalCluster
from gyrostat.local.home import Home
from gyrostat.local.host_pool import HostPool
from gyrostat.local.job_files import LocalJobFiles
from gyrostat.local.rotating_log import cut
from gyrostat.local.store import Store
from gyrostat.sched import loop
from gyrostat.sched.port import Snapshot
from gyrostat.sched.recording import TickRecorder

KEPT_S = 7 * 24 * 3600.0
"""How long jobs that have ended are kept by default."""
_HOUSEKEEPING_S = 30.0
_RECORDINGS = 20


class Daemon:
    """Runs from entering `with` to leaving it; `office` is its front."""

    def __init__(
        self,
        home: Home,
        layout: ClusterLayout,
        policy: str,
        *,
        keep: float = KEPT_S,
        spare: int = 1,
        workdirs: Sequence[Path] = (),
    ) -> None:
        self.home, self.layout, self.policy = home, layout, policy
        self._keep = keep
        scheduler_state = layout.scheduler_state(policy)
        home.make()
        self._house_due = time.monotonic() + _HOUSEKEEPING_S
        self._ended = threading.Event()
        self._crash: BaseException | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(_alone_in(home))
            self._store = Store(home.database, born=time.time())
            stack.callback(self._store.close)
            self.registry = Registry(self._store)
            stack.callback(self.registry.retry_writes)
            self._pool = HostPool(home.log, spare=spare)
            stack.callback(self._pool.close)
            self._recorder = stack.enter_context(_Recording(home, layout.setup(policy)))
            self.cluster = LocalCluster(home, self.registry, layout, scheduler_state, self._pool)
            backend = LocalBackend(home, self.registry, layout, self.cluster)
            self.service = ClusterService(self.registry, backend, LocalJobFiles(home, workdirs))
            self._scheduler_state = scheduler_state
            self._loop = threading.Thread(target=self._run, name="scheduling loop")
            self._closing = stack.pop_all()

    def __enter__(self) -> Self:
        self._pool.fill()
        self._loop.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without `office.shutdown` before, jobs train on."""
        try:
            if not self._ended.is_set():
                self.cluster.shut_down(checkpoint=False)
            self._loop.join()
            self.cluster.close()
        finally:
            self._closing.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Keep house until somebody asks the cluster to shut down; returns whether that has happened in time.

        May be called again and again with less time than lies between two rounds of the house.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            if time.monotonic() >= self._house_due:
                self.clean_up()
                self._house_due = time.monotonic() + _HOUSEKEEPING_S
            if self._ended.wait(max(0.0, min(self._house_due, deadline) - time.monotonic())):
                if self._crash is not None:
                    raise GyrostatError(
                        f"the scheduling loop failed: {self._crash!r}; jobs train on, start the daemon again"
                    ) from self._crash
                return True
            if time.monotonic() >= deadline:
                return False

    def await_ready(self, seconds: float) -> bool:
        """Whether a job that is submitted would find a host ready, by then."""
        return self._pool.await_ready(seconds)

    def clean_up(self) -> None:
        self.registry.retry_writes()
        with contextlib.suppress(StorageFull):
            for record in self.registry.forget(self.registry.clock() - self._keep):
                shutil.rmtree(self.home.job(record.id), ignore_errors=True)
        for old in self.home.recording_files()[:-_RECORDINGS]:
            old.unlink(missing_ok=True)
        cut(self.home.log)

    def _run(self) -> None:
        try:
            loop.run(self.cluster, self._scheduler_state, watchers=(self._recorder,))
        except Closed:
            pass
        except BaseException as error:
            self._crash = error
            self.cluster.shut_down(checkpoint=False)
        finally:
            self._ended.set()


class _Recording:
    """What the scheduler saw and decided since this daemon was started. A full disk ends the recording, not the daemon."""

    def __init__(self, home: Home, setup: dict[str, object]) -> None:
        path = home.recordings / f"{time.time():017.3f}.jsonl"
        self._recorder: TickRecorder | None = TickRecorder(path, setup)
        self._recorder.flush()
        self._due: float | None = None

    def __call__(self, snapshot: Snapshot, plan: Plan) -> None:
        nothing = not snapshot.changes and not plan.actions
        early = self._due is None or snapshot.now < self._due
        self._due = plan.wake_at
        if self._recorder is None or (nothing and early):
            return
        try:
            self._recorder(snapshot, plan)
            self._recorder.flush()
        except OSError:
            self._recorder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._recorder is not None:
            with contextlib.suppress(OSError):
                self._recorder.__exit__(None, None, None)


@contextlib.contextmanager
def _alone_in(home: Home) -> Iterator[None]:
    with home.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            who = lock.read().strip() or "unknown"
            raise UsageError(
                f"a cluster is running in {home.path} already (process {who}); end it with `gyrostat down`, or start another "
                "one elsewhere: --state DIR"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
