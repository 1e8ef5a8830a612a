"""Workers of an agent that was killed: what its successor sends them before they have reconnected."""

from __future__ import annotations

import os
import selectors
import socket
from pathlib import Path

from gyrostat.core.evidence import Evidence
from gyrostat.job.processes.channel import Channel
from gyrostat.job.processes.output import OutputStream
from gyrostat.job.processes.protocol import (
    Cancel,
    Exited,
    FromWorker,
    Hello,
    Ping,
    Rejoin,
    SetFence,
    ToWorker,
    WorkerId,
    WorkerSpec,
)
from gyrostat.job.processes.unix_socket import connect_to
from gyrostat.job.processes.worker_pool import WorkerPool

WORKER = WorkerId(2, 1)


class NoSource:
    """Has one worker, which exits when it is signalled."""

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        self._exits: list[Exited] = []

    def start(self, spec: WorkerSpec, stdout: int, stderr: int, channel: socket.socket) -> int:
        raise NotImplementedError

    def signal(self, pid: int, number: int) -> None:
        self._exits.append(Exited(pid, -number))

    def fileno(self) -> int:
        return self._reads

    def exits(self) -> list[Exited]:
        exits, self._exits = self._exits, []
        return exits

    def close(self) -> None:
        os.close(self._reads)
        os.close(self._writes)


class NoListener:
    def received(self, worker_id: WorkerId, message: FromWorker) -> None: ...

    def printed(self, worker_id: WorkerId, stream: OutputStream, line: str) -> None: ...

    def exited(self, worker_id: WorkerId, code: int, evidence: Evidence) -> None: ...


def test_messages_wait_for_a_worker_that_has_not_reconnected(tmp_path: Path) -> None:
    """One that is stopped for a while reconnects late: a recovery that it does not hear of would wait for it for ever."""
    source, selector = NoSource(), selectors.DefaultSelector()
    pool = WorkerPool(source, selector, NoListener(), tmp_path, rejoin_socket=tmp_path / "agent.socket")
    pool.adopt({4711: WORKER})
    for message in (Cancel(3), Ping(), SetFence(4, 0)):
        pool.send(WORKER, message)
    worker: Channel[ToWorker] = Channel(connect_to(tmp_path / "agent.socket"), ToWorker)
    worker.send(Hello(1, 4711))
    worker.send(Rejoin(WORKER))
    received: list[ToWorker] = []
    while len(received) < 2:
        for key, _ in selector.select(0.01):
            key.data()
        received += worker.drain()
    assert received == [Cancel(3), SetFence(4, 0)]
    pool.close()
    worker.close()
    selector.close()
    source.close()
