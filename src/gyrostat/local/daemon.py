"""The daemon of a cluster on this machine: it owns the state directory and runs the scheduling loop.

1. lock the state directory           (or name the process that has it)
2. open the database, and find the jobs that run
3. run the loop of `sched` in a thread, recorded
4. until its end: delete old jobs and recordings, retry writes that a full disk refused
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from gyrostat.cluster.eviction import GRACE_S
from gyrostat.cluster.layout import ClusterLayout
from gyrostat.cluster.registry import Registry
from gyrostat.cluster.service import ClusterService
from gyrostat.core.errors import GyrostatError, StorageFull, UsageError
from gyrostat.core.plan import Plan
from gyrostat.local.backend import LocalBackend
from gyrostat.local.cluster import Closed, LocalCluster
from gyrostat.local.environment import job_environment, variables
from gyrostat.local.home import Home
from gyrostat.local.host_fork_server import HostForkServer
from gyrostat.local.host_pool import HostPool
from gyrostat.local.job_files import LocalJobFiles
from gyrostat.local.rotating_log import cut
from gyrostat.local.store import Store
from gyrostat.sched import loop
from gyrostat.sched.port import Snapshot
from gyrostat.sched.recording import TickRecorder

KEPT_S = 7 * 24 * 3600.0
"""How long ended jobs are kept by default."""
CLEAN_UP_S = 30.0
_RECORDINGS = 20
_RESTARTS, _RESTARTS_S = 5, 60.0
"""A scheduler that fails more often than this in this many seconds ends the daemon; jobs train on."""
logger = logging.getLogger(__name__)


class Daemon:
    """Runs from entering `with` to leaving it. `service` has all operations."""

    def __init__(
        self,
        home: Home,
        layout: ClusterLayout,
        policy: str,
        *,
        keep: float = KEPT_S,
        spare: int = 1,
        workdirs: Sequence[Path] = (),
        modules: bool = False,
        pass_env: Sequence[str] = (),
        grace: float = GRACE_S,
    ) -> None:
        """`pass_env`: variables, or patterns of them, that jobs inherit beside those that they always do. `grace`: seconds in
        which a job leaves devices that the scheduler takes from it."""
        self.home, self.layout, self.policy = home, layout, policy
        self._keep = keep
        env = job_environment(variables(), pass_env)
        home.make()
        self._clean_up_due = time.monotonic() + CLEAN_UP_S
        self._ended = threading.Event()
        self._crash: BaseException | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(_locked(home))
            store = Store(home.database, born=time.time())
            stack.callback(store.close)
            history = store.observations()
            scheduler_state = layout.scheduler_state(policy, history)
            self.registry = Registry(store)
            stack.callback(self.registry.retry_writes)
            self._pool = HostPool(home.log, spare=spare, source=lambda log: HostForkServer(log, env))
            stack.callback(self._pool.close)
            self._recorder = stack.enter_context(_Recording(home, layout.setup(policy, history)))
            self.cluster = LocalCluster(home, self.registry, layout, scheduler_state, self._pool, grace=grace)
            backend = LocalBackend(home, self.registry, layout, self.cluster, grace)
            self.service = ClusterService(
                self.registry, backend, LocalJobFiles(home, workdirs, modules=modules)
            )
            self._scheduler_state = scheduler_state
            self._loop = threading.Thread(target=self._run, name="scheduling loop")
            self._closing = stack.pop_all()

    def __enter__(self) -> Self:
        self._pool.fill()
        self._loop.start()
        logger.info("the daemon runs in %s, policy %s", self.home.path, self.policy)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without `service.shutdown` before, jobs train on."""
        try:
            if not self._ended.is_set():
                self.cluster.shut_down(checkpoint=False)
            self._loop.join()
            self.cluster.close()
            logger.info("the daemon ends; jobs %s", "stopped" if self.cluster.stops_jobs else "train on")
        finally:
            self._closing.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until a shutdown is requested, and clean up now and then; returns whether it was requested in time.

        May be called repeatedly with a shorter time than the interval of cleaning up.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            if time.monotonic() >= self._clean_up_due:
                self.clean_up()
                self._clean_up_due = time.monotonic() + CLEAN_UP_S
            if self._ended.wait(max(0.0, min(self._clean_up_due, deadline) - time.monotonic())):
                if self._crash is not None:
                    raise GyrostatError(
                        f"the scheduling loop failed: {self._crash!r}; jobs train on, restart the daemon"
                    ) from self._crash
                return True
            if time.monotonic() >= deadline:
                return False

    def await_ready(self, seconds: float) -> bool:
        """Whether a host is ready after at most `seconds`."""
        return self._pool.await_ready(seconds)

    def clean_up(self) -> None:
        """Retry failed writes, delete old jobs and recordings, rotate the log."""
        self.registry.retry_writes()
        with contextlib.suppress(StorageFull):
            for record in self.registry.forget(self.registry.clock() - self._keep):
                shutil.rmtree(self.home.job(record.id), ignore_errors=True)
        for old in self.home.recording_files()[:-_RECORDINGS]:
            old.unlink(missing_ok=True)
        cut(self.home.log)

    def _run(self) -> None:
        restarts: deque[float] = deque(maxlen=_RESTARTS)
        try:
            while True:
                try:
                    loop.run(self.cluster, self._scheduler_state, watchers=(self._recorder,))
                except Closed:
                    raise
                except Exception as error:
                    now = time.monotonic()
                    if len(restarts) == _RESTARTS and now - restarts[0] < _RESTARTS_S:
                        raise
                    restarts.append(now)
                    logger.error("the scheduling loop failed; the scheduler starts anew", exc_info=error)
                    self.registry.note("trouble", f"the scheduler failed and starts anew: {error!r}")
                    history = self.registry.store.observations()
                    self._scheduler_state = self.cluster.restart_scheduler(
                        partial(self.layout.scheduler_state, self.policy, history)
                    )
                    with contextlib.suppress(UsageError, OSError):
                        self._recorder.begin(self.layout.setup(self.policy, history))
        except Closed:
            pass
        except BaseException as error:
            logger.error("the scheduling loop failed", exc_info=error)
            self._crash = error
            self.cluster.shut_down(checkpoint=False)
        finally:
            self._ended.set()


class _Recording:
    """What the scheduler observed and decided since it started. A full disk ends the recording, not the daemon."""

    def __init__(self, home: Home, setup: dict[str, object]) -> None:
        self._home = home
        self._recorder: TickRecorder | None = None
        self._due: float | None = None
        self.begin(setup)

    def begin(self, setup: dict[str, object]) -> None:
        """Of a scheduler that knows nothing yet."""
        self.__exit__()
        self._recorder, self._due = None, None
        self._recorder = TickRecorder(self._home.recordings / f"{time.time():017.3f}.jsonl", setup)
        self._recorder.flush()

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
def _locked(home: Home) -> Iterator[None]:
    with home.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise UsageError(
                f"a cluster is running in {home.path} already (process {owner}); end it with `gyrostat down`, or start another "
                "one elsewhere: --state DIR"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
