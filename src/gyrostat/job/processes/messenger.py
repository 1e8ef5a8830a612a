"""A worker's voice: the engine's Supervisor, speaking through the socket to the launcher.

A call costs some microseconds and never raises: if nobody listens any more, the worker is about to be ended
anyway. Short steps travel together, one message every 100 ms, so that the launcher's waking up does not slow
training down.

Under an agent, which may die before its workers, nothing is lost by that: what cannot be sent is kept, and the next agent
hears that, and once more what is of lasting meaning.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from gyrostat.core.job import ReductionChoice
from gyrostat.core.placement import Placement
from gyrostat.job.diagnostics.black_box import BlackBox
from gyrostat.job.processes.protocol import (
    LASTING,
    Channel,
    Checkpointed,
    Failed,
    FailureKind,
    GenerationPrepared,
    Logged,
    NotCheckpointed,
    PeerLossReported,
    Pong,
    Probed,
    Ready,
    Recovered,
    Rejoin,
    Started,
    StepReport,
    StepReports,
    Switched,
    ToWorker,
    WorkerEnded,
    WorkerFinished,
    WorkerId,
    WorkerLeaving,
    greet,
)
from gyrostat.job.processes.unix_socket import connect_to

_PATIENCE_S = 0.1
_LOOK_AGAIN_S = 0.05
_MOST_UNSENT = 10_000


class Messenger:
    """Implements `engine.supervisor.Supervisor`."""

    def __init__(
        self,
        channel: Channel[ToWorker],
        worker_id: WorkerId,
        agent: str | None = None,
        box: BlackBox | None = None,
        *,
        agent_timeout_s: float = float("inf"),
        on_orphaned: Callable[[bool], None] = lambda orphaned: None,
    ) -> None:
        """`agent`: path of the socket at which the agent's successor is found; `box`: where it is noted what runs.

        `on_orphaned`: called, in the thread that reads `messages`, with True when no agent has been found for
        `agent_timeout_s`, and with False when one is back.
        """
        self._agent_timeout_s, self._on_orphaned = agent_timeout_s, on_orphaned
        self._channel, self._worker_id, self._agent, self._box = channel, worker_id, agent, box
        self._lock = threading.Lock()  # the thread that connects to a new generation speaks, too
        self._waiting: list[StepReport] = []
        self._last_sent = float("-inf")
        self._connected = threading.Event()
        self._connected.set()
        self._lasting: dict[type, msgspec.Struct] = {}
        self._unsent: deque[msgspec.Struct] = deque(maxlen=_MOST_UNSENT)
        try:
            greet(channel)
        except OSError:
            self._connected.clear()

    @property
    def heard(self) -> bool:
        """Somebody listens, or will."""
        return self._connected.is_set() or self._agent is not None

    def messages(self) -> Iterator[ToWorker]:
        """What the agent says, and the one after it."""
        while True:
            try:
                messages = self._channel.receive()
            except OSError:
                messages = None
            if messages is not None:
                yield from messages
            elif self._agent is None:
                return
            else:
                self._reconnect(self._agent)

    def settle(self, patience: float) -> None:
        """Before leaving: until all has been said, but not for ever."""
        if self._agent is not None:
            self._connected.wait(patience)

    def _reconnect(self, path: str) -> None:
        """Until there is an agent again."""
        self._connected.clear()
        orphaned_at = time.monotonic() + self._agent_timeout_s
        while not self._connected.is_set():
            if time.monotonic() >= orphaned_at:
                self._on_orphaned(True)
            try:
                channel: Channel[ToWorker] = Channel(connect_to(path), ToWorker)
            except OSError:
                time.sleep(_LOOK_AGAIN_S)
                continue
            try:
                with self._lock:
                    self._introduce(channel)
            except OSError:
                channel.close()
                time.sleep(_LOOK_AGAIN_S)
        self._on_orphaned(False)

    def _introduce(self, channel: Channel[ToWorker]) -> None:
        greet(channel)
        for message in (Rejoin(self._worker_id), *self._lasting.values(), *self._unsent):
            channel.send(message)
        self._channel.close()
        self._channel = channel
        self._unsent.clear()
        self._connected.set()

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

    def stepped(
        self, step: int, epoch: int, loss: float | None, samples: int, busy: Sequence[float] = ()
    ) -> None:
        now = time.monotonic()
        with self._lock:
            self._waiting.append(StepReport(step, epoch, loss, samples, now, tuple(busy)))
        if now - self._last_sent >= _PATIENCE_S:
            self.flush()
            self._last_sent = now

    def runs(self, step: int, rank: int, number: int, samples: Sequence[int] | None) -> None:
        if self._box is not None:
            self._box.note(step, rank, number, samples)

    def ran(self) -> None:
        if self._box is not None:
            self._box.clear()

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._send(Logged(step, {name: float(value) for name, value in metrics.items()}))

    def probed(self, step: int, digest: str, tensors: Mapping[str, str]) -> None:
        self._send(Probed(step, digest, dict(tensors)))

    def checkpoints(self) -> None:
        self.flush()

    def checkpointed(self, step: int, path: str, seconds: float, blocked: float) -> None:
        self._send(Checkpointed(step, path, seconds, blocked))

    def checkpoint_failed(self, reason: str) -> None:
        self._send(NotCheckpointed(reason))

    def finished(self, step: int, digest: str) -> None:
        self._send(WorkerFinished(step, digest, time.monotonic()))

    def failed(self, kind: FailureKind, summary: str, traceback: str) -> None:
        self._send(Failed(kind, summary, traceback))

    def ended(self, *, stopped: bool, left: bool = False, asked_by: int | None = None) -> None:
        self._send(WorkerEnded(stopped, left, asked_by))

    def ready(self, alike: Mapping[str, str]) -> None:
        self._send(Ready(dict(alike)))

    def prepared(self, generation: int) -> None:
        self._send(GenerationPrepared(generation))

    def switched(
        self, generation: int, step: int, workers: int, paused: float, why_all: str | None = None
    ) -> None:
        self._send(Switched(generation, step, workers, paused, why_all))

    def lost(self, generation: int, why: str) -> None:
        self._send(PeerLossReported(generation, why))

    def recovered(self, generation: int, placement: Placement, again: int, paused: float) -> None:
        self._send(Recovered(generation, placement, again, paused))

    def is_here(self) -> None:
        """Not the engine's, either: somebody wants to know."""
        with self._lock:
            if self._connected.is_set():
                self._write(Pong())

    def leaving(self) -> None:
        """Not the engine's: the process was asked to."""
        self._send(WorkerLeaving())

    def flush(self) -> None:
        """Send the steps that are waiting."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            steps, self._waiting = self._waiting, []
            self._write(StepReports(steps))

    def _send(self, message: msgspec.Struct) -> None:
        with self._lock:
            self._flush()
            self._write(message)

    def _write(self, message: msgspec.Struct) -> None:
        lasting = isinstance(message, LASTING)
        if lasting:
            self._lasting.pop(type(message), None)  # the order is that of when they were said last
            self._lasting[type(message)] = message
        if self._connected.is_set():
            try:
                self._channel.send(message)
                return
            except OSError:
                self._connected.clear()
        if not lasting:
            self._unsent.append(message)
