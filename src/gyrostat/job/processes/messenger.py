"""The engine's Supervisor in a worker process: turns its calls into messages to the agent (`agent_connection`).

The micro-batch that is running is noted in the black box instead (`diagnostics.black_box`), which is readable even after the
worker was killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from gyrostat.core.job import ReductionChoice
from gyrostat.core.logs import note
from gyrostat.core.placement import Placement
from gyrostat.job.diagnostics.black_box import BlackBox
from gyrostat.job.processes.agent_connection import AgentConnection
from gyrostat.job.processes.protocol import (
    Checkpointed,
    Failed,
    FailureKind,
    GenerationPrepared,
    Logged,
    NotCheckpointed,
    PeerLossReported,
    Probed,
    Ready,
    Recovered,
    Started,
    StepReport,
    Switched,
    WorkerFinished,
)

_SEND_TIMEOUT_S = 5.0


class Messenger:
    """Implements `engine.supervisor.Supervisor`. Called from the script's thread and from the engine's threads."""

    def __init__(self, connection: AgentConnection, black_box: BlackBox | None = None) -> None:
        self._connection, self._black_box = connection, black_box

    def started(
        self,
        step: int,
        resumed_from: str | None,
        refused: list[str],
        virtual_workers: int,
        reduction: ReductionChoice,
        compatibility: Mapping[str, str],
    ) -> None:
        now = time.monotonic()
        started = Started(step, resumed_from, refused, now, virtual_workers, reduction, dict(compatibility))
        self._connection.send(started)

    def stepped(
        self, step: int, epoch: int, loss: float | None, samples: int, busy: Sequence[float] = ()
    ) -> None:
        now = time.monotonic()
        self._connection.add_step(StepReport(step, epoch, loss, samples, now, tuple(busy)))

    def runs(self, step: int, rank: int, number: int, samples: Sequence[int] | None) -> None:
        if self._black_box is not None:
            self._black_box.note(step, rank, number, samples)

    def ran(self) -> None:
        if self._black_box is not None:
            self._black_box.clear()

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._connection.send(Logged(step, {name: float(value) for name, value in metrics.items()}))

    def probed(self, step: int, digest: str, tensors: Mapping[str, str]) -> None:
        self._connection.send(Probed(step, digest, dict(tensors)))

    def checkpoints(self) -> None:
        self._connection.flush()

    def checkpointed(self, step: int, path: str, seconds: float, blocked: float) -> None:
        self._connection.send(Checkpointed(step, path, seconds, blocked))

    def checkpoint_failed(self, reason: str) -> None:
        self._connection.send(NotCheckpointed(reason))

    def finished(self, step: int, digest: str) -> None:
        self._connection.send(WorkerFinished(step, digest, time.monotonic()))

    def ready(self, compatibility: Mapping[str, str]) -> None:
        self._connection.send(Ready(dict(compatibility)))

    def prepared(self, generation: int) -> None:
        self._connection.send(GenerationPrepared(generation))

    def switched(
        self, generation: int, step: int, workers: int, paused: float, why_all: str | None = None
    ) -> None:
        self._connection.send(Switched(generation, step, workers, paused, why_all))

    def not_arrived(self, why: str) -> None:
        note(f"this new worker {why}; it is given up")
        self._connection.send(Failed(FailureKind.PEER_LOST, why, why))
        self._connection.wait_until_sent(_SEND_TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGKILL)  # not an exit by its own fault: the others go on without it

    def lost(self, generation: int, why: str) -> None:
        self._connection.send(PeerLossReported(generation, why))

    def recovered(self, generation: int, placement: Placement, again: int, paused: float) -> None:
        self._connection.send(Recovered(generation, placement, again, paused))
