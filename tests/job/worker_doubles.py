"""Waiting for real processes without sleeping: the kernel says when one is gone."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field

from gyrostat.job.control.observer import NullObserver
from gyrostat.job.processes.output import OutputStream

TIMEOUT_S = 120.0


class Departure:
    """Taken while the process lives; `wait` returns when it is gone."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def wait(self) -> None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        gone = poll.poll(TIMEOUT_S * 1000)
        os.close(self._pidfd)
        assert gone, f"process {self.pid} is still there after {TIMEOUT_S} s"


@dataclass
class Listener(NullObserver):
    """Keeps what workers print, and reacts to a line."""

    react: Callable[[int, str], None] = lambda worker, line: None
    lines: list[tuple[int, OutputStream, str]] = field(default_factory=list)

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        self.lines.append((worker, stream, line))
        self.react(worker, line)

    def of(self, worker: int) -> list[str]:
        return [line for index, _, line in self.lines if index == worker]
