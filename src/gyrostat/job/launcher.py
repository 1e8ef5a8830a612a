"""Runs one job on this machine, from the start of its workers to the result.

`run_job` is the entry. The job is led (`leader`) in the process whose event loop (`event_loop`) listens to its workers; several
machines need an `agent` each instead. A job with parameter servers is led by `server_job`. However it ends, also by an
exception, no worker is left running.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gyrostat.core.evidence import Evidence
from gyrostat.core.job import Assignment
from gyrostat.job.control.control_socket import Connection, ControlSocket
from gyrostat.job.control.event_loop import Loop
from gyrostat.job.control.executor import LeaderRecord
from gyrostat.job.control.leader import Leader
from gyrostat.job.control.observer import NullObserver, Observer
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.requests import Request
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.control.trace_file import join_traces
from gyrostat.job.processes.output import LogFiles, OutputStream
from gyrostat.job.processes.protocol import FromWorker, WorkerId
from gyrostat.job.processes.signals import SignalQueue, caught
from gyrostat.job.processes.start import WorkerForkServer, WorkerSource

__all__ = ["RunRequest", "run_job"]


def run_job(
    request: RunRequest,
    *,
    parent: WorkerSource | None = None,
    observer: Observer | None = None,
    forward_signals: bool = False,
) -> Outcome:
    """Run a job to its end; `Outcome.check` raises if it failed.

    `parent` is a fork server that is running already (it serves one job at a time); the default is one for this job.
    `forward_signals` handles SIGINT, SIGTERM, SIGHUP and SIGUSR1 of this process meanwhile.
    """
    request.check()
    observer = observer or NullObserver()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(caught()) if forward_signals else None
        source = parent if parent is not None else stack.enter_context(WorkerForkServer())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gyrostat-")))
        if request.servers is not None:
            # Not above: it imports NumPy, which starts threads, and fork servers import this module.
            from gyrostat.job.server_job.run import ServerJobMachine

            server_job = ServerJobMachine(request, source, observer, signals, directory)
            stack.callback(server_job.close)
            outcome = server_job.run()
        else:
            machine = _OneMachine(request, source, observer, signals, directory)
            stack.callback(machine.close)
            outcome = machine.run()
            if request.output.trace is not None:
                join_traces(machine.traces(machine.attempts), request.output.trace)
    observer.over(outcome)
    return outcome


class _OneMachine:
    """A leader and its workers on one machine: implements `WorkerExecutor` and `WorkerListener`."""

    def __init__(
        self,
        request: RunRequest,
        source: WorkerSource,
        observer: Observer,
        signals: SignalQueue | None,
        directory: Path,
    ) -> None:
        self._request, self._observer, self._directory = request, observer, directory
        self.attempts = 0
        self._leader = Leader(request, self, observer)
        self._loop = Loop(
            source,
            self,
            on_signal=self._leader.signalled,
            on_request=self._asked,
            boxes=directory,
            signals=signals,
            control_socket=ControlSocket(request.name) if request.name else None,
            logs=LogFiles(request.output.log_dir) if request.output.log_dir else None,
        )

    def run(self) -> Outcome:
        self._leader.begin()
        self._loop.workers.take_exits()  # exits during the start have been read already, and do not wake the loop
        while True:
            self._leader.tick()
            if self._leader.outcome is not None:
                return self._leader.outcome
            wait = self._observer.ticked()
            self._loop.turn(self._leader.deadline(), None if wait is None else time.monotonic() + wait)

    def close(self) -> None:
        self._leader.close()
        self._loop.close()

    # WorkerListener.

    def received(self, worker_id: WorkerId, message: FromWorker) -> None:
        self._leader.heard(worker_id, message)

    def printed(self, worker_id: WorkerId, stream: OutputStream, line: str) -> None:
        self._observer.printed(worker_id.member, stream, line)

    def exited(self, worker_id: WorkerId, code: int, evidence: Evidence) -> None:
        self._leader.exited(worker_id, code, evidence)

    def _asked(self, request: Request, connection: Connection) -> None:
        self._leader.asked(request, connection)

    # WorkerExecutor.

    def start(self, worker_id: WorkerId, assignment: Assignment) -> None:
        self.attempts = worker_id.attempt
        self._loop.workers.start(worker_id, self._request.spec(assignment))

    def tell(self, worker_id: WorkerId, message: msgspec.Struct) -> None:
        self._loop.workers.send(worker_id, message)

    def signal(self, worker_id: WorkerId, number: int) -> None:
        self._loop.workers.signal(worker_id, number)

    def reaches(self, worker_id: WorkerId) -> bool:
        return True

    def store(self, attempt: int, generation: int) -> str:
        return str(self.traces(attempt) / f"store-{generation}")

    def traces(self, attempt: int) -> Path:
        path = self._directory / f"attempt-{attempt}"
        path.mkdir(exist_ok=True)
        return path

    def keep(self, record: Callable[[], LeaderRecord]) -> bool:
        """There can be no other leader: the job ends with this process."""
        return True
