"""Runs one job on this machine: starts its workers, listens, ends them all, and says what came of it.

`run_job` is the whole of it. The job is led (`leader`) in the same process whose loop (`loop`) hears its workers; several
machines need an `agent` each instead. However it ends, by an exception too, no worker is left running.
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
from gyrostat.job.control.control_socket import Connection, ControlSocket, Request
from gyrostat.job.control.event_loop import Loop
from gyrostat.job.control.leader import Leader, LeaderRecord
from gyrostat.job.control.observer import NullObserver, Observer
from gyrostat.job.control.outcome import Outcome
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
    """Run a job to its end, good or bad; `Outcome.check` raises if it was bad.

    `parent` is a fork parent that is running already (it serves one job at a time); without one, one is
    started and ended. `forward_signals` takes over SIGINT, SIGTERM, SIGHUP and SIGUSR1 of this process
    meanwhile.
    """
    request.check()
    observer = observer or NullObserver()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(caught()) if forward_signals else None
        source = parent if parent is not None else stack.enter_context(WorkerForkServer())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gyrostat-")))
        machine = _OneMachine(request, source, observer, signals, directory)
        stack.callback(machine.close)
        outcome = machine.run()
        if request.trace is not None:
            join_traces(machine.traces(machine.attempts), request.trace)
    observer.over(outcome)
    return outcome


class _OneMachine:
    """A leader whose hands and ears are in the same process: implements `leader.Hands` and `crew.Ears`."""

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
            door=ControlSocket(request.name) if request.name else None,
            logs=LogFiles(request.log_dir) if request.log_dir else None,
        )

    def run(self) -> Outcome:
        self._leader.begin()
        self._loop.crew.take_exits()  # those that came while others were started have been read, and wake nobody up
        while True:
            self._leader.tick()
            if self._leader.outcome is not None:
                return self._leader.outcome
            wish = self._observer.ticked()
            self._loop.turn(self._leader.deadline(), None if wish is None else time.monotonic() + wish)

    def close(self) -> None:
        self._leader.close()
        self._loop.close()

    # Ears.

    def heard(self, worker_id: WorkerId, message: FromWorker) -> None:
        self._leader.heard(worker_id, message)

    def printed(self, worker_id: WorkerId, stream: OutputStream, line: str) -> None:
        self._observer.printed(worker_id.member, stream, line)

    def exited(self, worker_id: WorkerId, code: int, evidence: Evidence) -> None:
        self._leader.exited(worker_id, code, evidence)

    def _asked(self, request: Request, connection: Connection) -> None:
        self._leader.asked(request, connection)

    # Hands.

    def start(self, worker_id: WorkerId, assignment: Assignment) -> None:
        self.attempts = worker_id.attempt
        self._loop.crew.start(worker_id, self._request.spec(assignment))

    def tell(self, worker_id: WorkerId, message: msgspec.Struct) -> None:
        self._loop.crew.tell(worker_id, message)

    def signal(self, worker_id: WorkerId, number: int) -> None:
        self._loop.crew.signal(worker_id, number)

    def reaches(self, worker_id: WorkerId) -> bool:
        return True

    def store(self, attempt: int, generation: int) -> str:
        return str(self.traces(attempt) / f"store-{generation}")

    def traces(self, attempt: int) -> Path:
        path = self._directory / f"attempt-{attempt}"
        path.mkdir(exist_ok=True)
        return path

    def keep(self, record: Callable[[], LeaderRecord]) -> bool:
        """There is no other leader: the job ends with this process."""
        return True
