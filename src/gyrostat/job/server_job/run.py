"""A server job on this machine: a leader, its servers and its workers in one event loop. `launcher.run_job` is the entry.

However it ends, also by an exception, no worker and no server is left running.
"""

from __future__ import annotations

import time
from pathlib import Path

from gyrostat.core.evidence import Evidence
from gyrostat.core.job import Assignment
from gyrostat.job.control.control_socket import Connection, ControlSocket
from gyrostat.job.control.event_loop import Loop
from gyrostat.job.control.observer import Observer
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.requests import Request
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.processes.output import LogFiles, OutputStream
from gyrostat.job.processes.protocol import FromWorker, Ping, WorkerId
from gyrostat.job.processes.signals import SignalQueue
from gyrostat.job.processes.start import WorkerSource
from gyrostat.job.server_job.leader import ServerJobLeader
from gyrostat.job.server_job.servers import PsServers


class ServerJobMachine:
    """Implements `ServerJobExecutor` and `WorkerListener`."""

    def __init__(
        self,
        request: RunRequest,
        source: WorkerSource,
        observer: Observer,
        signals: SignalQueue | None,
        directory: Path,
    ) -> None:
        """`directory`: for what need not outlive the job."""
        self._request, self._observer = request, observer
        self._leader: ServerJobLeader
        self._loop = Loop(
            source,
            self,
            on_signal=lambda number: self._leader.signalled(number),
            on_request=self._asked,
            boxes=directory,
            signals=signals,
            control_socket=ControlSocket(request.name) if request.name else None,
            logs=LogFiles(request.output.log_dir) if request.output.log_dir else None,
        )
        try:
            self._servers = PsServers(
                request, self._loop.selector, directory, lambda found: self._leader.from_servers(found)
            )
        except BaseException:
            self._loop.close()
            raise
        self._leader = ServerJobLeader(request, self, self._servers, observer)

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
        try:
            self._leader.close()
        finally:
            try:
                self._servers.close()
            finally:
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

    # ServerJobExecutor.

    def start(self, worker_id: WorkerId, assignment: Assignment) -> None:
        self._loop.workers.start(worker_id, self._request.spec(assignment))

    def tell(self, worker_id: WorkerId, message: Ping) -> None:
        self._loop.workers.send(worker_id, message)

    def signal(self, worker_id: WorkerId, number: int) -> None:
        self._loop.workers.signal(worker_id, number)
