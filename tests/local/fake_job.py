"""A job without workers: it holds the lock of its directory and answers on its control socket, as a host does."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from gyrostat.core.phase import JobPhase, ReconfigurationPhase
from gyrostat.job.control.control_socket import control_socket_at
from gyrostat.job.control.requests import AskStatus, Occupy, Request, RequestResult, Status
from gyrostat.job.processes.channel import Channel
from gyrostat.job.processes.unix_socket import bind_at
from gyrostat.local.host_files import holding


class FakeJob:
    """Answers status requests with `status` and all others with `result`, and records these in `requests`."""

    def __init__(self, job: str, directory: Path, sockets: Path) -> None:
        """`directory`: the job's own; `sockets`: of the daemon's home."""
        self.requests: SimpleQueue[Request] = SimpleQueue()
        self.status = job_status(JobPhase.STARTING)
        self.result = RequestResult(True, "moved")
        self.lies: tuple[int, ...] | None = None
        """The devices that its status shows, whatever it replies to a request to move."""
        directory.mkdir(parents=True, exist_ok=True)
        (sockets / "gyrostat").mkdir(parents=True, exist_ok=True)
        self._path = control_socket_at(sockets / "gyrostat", job)
        self._lock = holding(directory)
        self._listener = bind_at(self._path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._connections: list[socket.socket] = []

    def __enter__(self) -> Self:
        assert self._lock.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """It ends, without a result unless one was written before."""
        self._path.unlink(missing_ok=True)
        self._lock.__exit__(None, None, None)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        threads = []
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threads.append(threading.Thread(target=self._answer, args=(Channel(connection, Request),)))
                threads[-1].start()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

    def _answer(self, channel: Channel[Request]) -> None:
        with contextlib.suppress(OSError):
            while (requests := channel.receive()) is not None:
                for request in requests:
                    if isinstance(request, AskStatus):
                        channel.send(self.status)
                    else:
                        self._obey(request)
                        channel.send(self.result)
        channel.close()

    def _obey(self, request: Request) -> None:
        self.requests.put(request)
        if isinstance(request, Occupy) and self.result.done:
            devices = tuple(slot.device for slot in request.slots)
            self.status = job_status(JobPhase.TRAINING, devices if self.lies is None else self.lies)


def job_status(phase: JobPhase, devices: tuple[int, ...] = (), step: int = 3) -> Status:
    return Status(
        name="j1",
        program="x.py",
        pid=1,
        virtual_workers=1,
        workers=len(devices),
        members=tuple(range(len(devices))),
        generation=1,
        phase=phase,
        reconfiguration=ReconfigurationPhase.STEADY,
        step=step,
        loss=None,
        throughput=None,
        devices=devices,
    )
