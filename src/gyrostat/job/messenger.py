"""A worker's voice: the engine's Supervisor, speaking through the socket to the launcher.

A call costs some microseconds and never raises: if nobody listens any more, the worker is about to be ended
anyway. Short steps travel together, one message every 20 ms, so that the launcher's waking up does not slow
training down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import msgspec

from gyrostat.core.job import ReductionChoice
from gyrostat.job.protocol import (
    Channel,
    Checkpointed,
    Ended,
    Failed,
    FailureKind,
    Finished,
    Logged,
    Prepared,
    Probed,
    Ready,
    Started,
    Step,
    Steps,
    Switched,
    ToWorker,
    greet,
)

_PATIENCE_S = 0.1


class Messenger:
    """Implements `engine.supervisor.Supervisor`."""

    def __init__(self, channel: Channel[ToWorker]) -> None:
        self._channel = channel
        self._lock = threading.Lock()  # the thread that connects to a new generation speaks, too
        self._waiting: list[Step] = []
        self._last_sent = float("-inf")
        self.heard = True
        """Somebody listens."""
        try:
            greet(channel)
        except OSError:
            self.heard = False

    def started(
        self,
        step: int,
        resumed_from: str | None,
        refused: list[str],
        virtual_workers: int,
        reduction: ReductionChoice,
        alike: Mapping[str, str],
    ) -> None:
        now = time.monotonic()
        self._send(Started(step, resumed_from, refused, now, virtual_workers, reduction, dict(alike)))

    def stepped(self, step: int, epoch: int, loss: float | None, samples: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._waiting.append(Step(step, epoch, loss, samples, now))
        if now - self._last_sent >= _PATIENCE_S:
            self.flush()
            self._last_sent = now

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._send(Logged(step, {name: float(value) for name, value in metrics.items()}))

    def probed(self, step: int, digest: str, tensors: Mapping[str, str]) -> None:
        self._send(Probed(step, digest, dict(tensors)))

    def checkpointed(self, step: int, path: str, seconds: float, blocked: float) -> None:
        self._send(Checkpointed(step, path, seconds, blocked))

    def finished(self, step: int, digest: str) -> None:
        self._send(Finished(step, digest, time.monotonic()))

    def failed(self, kind: FailureKind, summary: str, traceback: str) -> None:
        self._send(Failed(kind, summary, traceback))

    def ended(self, *, stopped: bool, left: bool = False) -> None:
        self._send(Ended(stopped, left))

    def ready(self, alike: Mapping[str, str]) -> None:
        self._send(Ready(dict(alike)))

    def prepared(self, generation: int) -> None:
        self._send(Prepared(generation))

    def switched(
        self, generation: int, step: int, workers: int, paused: float, why_all: str | None = None
    ) -> None:
        self._send(Switched(generation, step, workers, paused, why_all))

    def flush(self) -> None:
        """Send the steps that are waiting."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            steps, self._waiting = self._waiting, []
            self._write(Steps(steps))

    def _send(self, message: msgspec.Struct) -> None:
        with self._lock:
            self._flush()
            self._write(message)

    def _write(self, message: msgspec.Struct) -> None:
        if not self.heard:
            return
        try:
            self._channel.send(message)
        except OSError:
            self.heard = False
