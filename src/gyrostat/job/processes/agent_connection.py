"""The worker's connection to its agent: reconnects to the agent's successor, and sends it what it has to know.

A call to `send` takes some microseconds and never raises: a worker whose agent has gone away for good is about to be ended.
Step reports are batched, one message every 100 ms, so that the agent's wake-ups do not slow training down.

An agent may be killed and started again while its workers train on. Messages that cannot be sent are queued; the next agent
receives them, after the last message of each type in `protocol.LASTING`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from gyrostat.core.phase import AgentPresence
from gyrostat.job.processes.channel import Channel, greet
from gyrostat.job.processes.protocol import (
    LASTING,
    Pong,
    Rejoin,
    StepReport,
    StepReports,
    ToWorker,
    WorkerId,
)
from gyrostat.job.processes.unix_socket import connect_to

logger = logging.getLogger(__name__)

_BATCH_S = 0.1
_RETRY_S = 0.05
_MAX_UNSENT = 10_000


class AgentConnection:
    """Thread-safe: the script's thread and the thread that connects to a new generation both send; one thread reads."""

    def __init__(
        self,
        channel: Channel[ToWorker],
        worker_id: WorkerId,
        successor: str | None = None,
        *,
        agent_timeout_s: float = float("inf"),
        on_agent: Callable[[AgentPresence], None] = lambda agent: None,
    ) -> None:
        """`successor`: the path of the socket of the agent's successor; None: the agent has none.

        `on_agent` is called in the thread that reads `messages`, when the agent is away, when none was reachable for
        `agent_timeout_s`, and when one is back.
        """
        self._agent_timeout_s, self._on_agent = agent_timeout_s, on_agent
        self._channel, self._worker_id, self._successor = channel, worker_id, successor
        self._lock = threading.Lock()
        self._steps: list[StepReport] = []
        self._steps_sent_at = float("-inf")
        self._connected = threading.Event()
        self._connected.set()
        self._lasting: dict[type, msgspec.Struct] = {}
        self._unsent: deque[msgspec.Struct] = deque(maxlen=_MAX_UNSENT)
        try:
            greet(channel)
        except OSError:
            self._connected.clear()

    @property
    def delivers(self) -> bool:
        """Messages reach an agent, now or when its successor has started."""
        return self._connected.is_set() or self._successor is not None

    def messages(self) -> Iterator[ToWorker]:
        """The messages of the agent and of its successors."""
        while True:
            try:
                messages = self._channel.receive()
            except OSError:
                messages = None
            if messages is not None:
                yield from messages
            elif self._successor is None:
                return
            else:
                self._reconnect(self._successor)

    def send(self, message: msgspec.Struct) -> None:
        """Send the batched steps, then `message`."""
        with self._lock:
            self._send_steps()
            self._write(message)

    def add_step(self, report: StepReport) -> None:
        """Send this step with the current batch."""
        with self._lock:
            self._steps.append(report)
            if report.at - self._steps_sent_at >= _BATCH_S:
                self._send_steps()
                self._steps_sent_at = report.at

    def flush(self) -> None:
        """Send the batched steps now."""
        with self._lock:
            self._send_steps()

    def answer_ping(self) -> None:
        """Not queued for a successor: it sends pings of its own."""
        with self._lock:
            if self._connected.is_set():
                self._write(Pong())

    def wait_until_sent(self, timeout: float) -> None:
        """Before the process exits: wait until an agent has received everything, at most `timeout` seconds."""
        if self._successor is not None:
            self._connected.wait(timeout)

    def close(self) -> None:
        self._channel.close()

    def _reconnect(self, path: str) -> None:
        """Return when connected to the next agent."""
        self._connected.clear()
        logger.info("worker lost its agent, waits for the next one at %s", path)
        self._on_agent(AgentPresence.AWAY)
        orphaned_at = time.monotonic() + self._agent_timeout_s
        while not self._connected.is_set():
            if time.monotonic() >= orphaned_at:
                self._on_agent(AgentPresence.ORPHANED)
            try:
                channel: Channel[ToWorker] = Channel(connect_to(path), ToWorker)
            except OSError:
                time.sleep(_RETRY_S)
                continue
            try:
                with self._lock:
                    self._rejoin(channel)
            except OSError:
                channel.close()
                time.sleep(_RETRY_S)
        self._on_agent(AgentPresence.PRESENT)
        logger.info("worker is connected to the next agent")

    def _rejoin(self, channel: Channel[ToWorker]) -> None:
        greet(channel)
        for message in (Rejoin(self._worker_id), *self._lasting.values(), *self._unsent):
            channel.send(message)
        self._channel.close()
        self._channel = channel
        self._unsent.clear()
        self._connected.set()

    def _send_steps(self) -> None:
        if self._steps:
            steps, self._steps = self._steps, []
            self._write(StepReports(steps))

    def _write(self, message: msgspec.Struct) -> None:
        lasting = isinstance(message, LASTING)
        if lasting:
            self._lasting.pop(type(message), None)  # keeps them in the order in which they were last sent
            self._lasting[type(message)] = message
        if self._connected.is_set():
            try:
                self._channel.send(message)
                return
            except OSError:
                self._connected.clear()
        if not lasting:
            self._unsent.append(message)
