"""The driver's end of a job's control socket: connects as soon as the job listens, and polls its status."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from gyrostat.core.errors import GyrostatError
from gyrostat.job.control.control_socket import control_socket_at
from gyrostat.job.control.requests import AskStatus, AskStop, Occupy, Reply, ScaleRoles, Status, Vacate
from gyrostat.job.processes.channel import Channel, ProtocolError
from gyrostat.job.processes.unix_socket import connect_to

POLL_S = 0.5
"""How often a job is asked for its status."""
_CONNECT_S = 0.02
_ADOPT_S = 5.0

PolledFile: TypeAlias = "socket.socket | Channel[Reply]"


class JobConnection:
    """For one thread. A connection that breaks is closed, and opened again by the next `poll`."""

    def __init__(self, directory: Path, job: str) -> None:
        """`directory`: of the control sockets."""
        self._path = control_socket_at(directory, job)
        self._channel: Channel[Reply] | None = None
        self._asked_at: float | None = None

    @property
    def channel(self) -> Channel[Reply] | None:
        """To wait for its replies; None: there is no connection."""
        return self._channel

    def poll(self, now: float) -> float:
        """Connect if necessary, and ask for the status if it is time. Returns the seconds until the next poll."""
        if self._channel is None:
            with contextlib.suppress(OSError):
                self._channel, self._asked_at = self._connect(), None
            if self._channel is None or not self.send(AskStatus(after_a_step=True)):
                return _CONNECT_S
        if self._asked_at is None or now - self._asked_at >= POLL_S:
            self._asked_at = now
            self.send(AskStatus())
        return POLL_S

    def poll_soon(self) -> None:
        """Have the next `poll` ask for the status."""
        self._asked_at = None

    def send(self, request: AskStatus | AskStop | Occupy | ScaleRoles | Vacate) -> bool:
        """False: there is no connection."""
        if self._channel is None:
            return False
        try:
            self._channel.send(request)
        except OSError:
            self.close()
            return False
        return True

    def receive(self) -> list[Reply]:
        """Without waiting."""
        if self._channel is None:
            return []
        try:
            replies = self._channel.receive(wait=False)
        except BlockingIOError:
            return []
        except (OSError, ProtocolError):
            replies = None
        if replies is None:
            self.close()
        return list(replies or ())

    def query(self) -> Status | None:
        """The status, over a connection of its own; None: the job does not answer within a few seconds."""
        deadline = time.monotonic() + _ADOPT_S
        with contextlib.suppress(OSError, GyrostatError), contextlib.closing(self._connect()) as channel:
            channel.send(AskStatus())
            while readable([channel], max(0.0, deadline - time.monotonic())):
                replies = channel.receive(wait=False)
                if replies is None:
                    return None
                for reply in replies:
                    if isinstance(reply, Status):
                        return reply
        return None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connect(self) -> Channel[Reply]:
        return Channel(connect_to(self._path), Reply)


class WakeUp:
    """Wakes a thread that waits in `readable`. `wake` may be called from any thread."""

    def __init__(self) -> None:
        self.waiting, self._waking = socket.socketpair()
        self.waiting.setblocking(False)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waking.send(b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.waiting.recv(4096)

    def close(self) -> None:
        self.waiting.close()
        self._waking.close()


def readable(files: Sequence[PolledFile], wait: float | None) -> list[PolledFile]:
    """Those that have data within `wait` seconds (None: without limit). Unlike `select`, for any number of open files."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    found = {number for number, _ in poll.poll(None if wait is None else math.ceil(wait * 1000))}
    return [file for file in files if file.fileno() in found]
