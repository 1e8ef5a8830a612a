"""The worker processes of a run, as targets of faults.

The recorder in each worker (`inside`) records its process id. Signals go through a pidfd, so they never reach another process
that got the same id later.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass

from gyrostat.job.chaos.plan import Fault


@dataclass
class WorkerTarget:
    """One worker process."""

    member: int
    pid: int
    pidfd: int

    def signal(self, number: int) -> bool:
        """False: it has exited."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    @property
    def lives(self) -> bool:
        """Whether it has not exited; an exited process accepts signals until it is reaped."""
        return not select.select([self.pidfd], [], [], 0)[0]

    def __str__(self) -> str:
        return f"worker {self.member} (process {self.pid})"


class WorkerTargets:
    """All worker processes of a run and their fork servers. Used from the run's thread and from the threads of its faults."""

    def __init__(self) -> None:
        self._workers: dict[int, WorkerTarget] = {}
        self._fork_servers: dict[int, int] = {}
        self._stopped: list[tuple[float, WorkerTarget]] = []
        self._killed: set[int] = set()

    def add(self, member: int, pid: int, fork_server: int) -> None:
        """A worker that has started; ignored if it has exited already."""
        with contextlib.suppress(ProcessLookupError):
            self._workers[pid] = WorkerTarget(member, pid, os.pidfd_open(pid))
            if fork_server not in self._fork_servers:
                self._fork_servers[fork_server] = os.pidfd_open(fork_server)

    def kill(self, fault: Fault, count: int) -> list[str]:
        """Kill at most `count` workers; returns their names."""
        killed = [worker for worker in fault.victims(self._living(), count) if worker.signal(signal.SIGKILL)]
        self._killed |= {worker.pid for worker in killed}
        return list(map(str, killed))

    def stop(self, fault: Fault) -> list[str]:
        """Stop a worker for a while; returns its name, or nothing if there was none."""
        stopped = [worker for worker in fault.victims(self._living(), 1) if worker.signal(signal.SIGSTOP)]
        self._stopped += [(time.monotonic() + fault.seconds, worker) for worker in stopped]
        return list(map(str, stopped))

    def continue_stopped(self) -> None:
        """Continue the stopped workers whose time is over."""
        now = time.monotonic()
        for until, worker in self._stopped:
            if now >= until:
                worker.signal(signal.SIGCONT)
        self._stopped = [(until, worker) for until, worker in self._stopped if now < until]

    def close(self) -> None:
        """Kill all of them."""
        for pidfd in (*self._fork_servers.values(), *(worker.pidfd for worker in self._workers.values())):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)

    def _living(self) -> list[WorkerTarget]:
        """Those that are neither killed nor stopped nor ended."""
        out = self._killed | {worker.pid for _, worker in self._stopped}
        return [worker for worker in self._workers.values() if worker.pid not in out and worker.lives]
