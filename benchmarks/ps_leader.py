"""A job's `PsLeader` whose loop runs in a thread of the benchmark."""

from __future__ import annotations

import os
import queue
import selectors
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from gyrostat.ps.control.leader import PsLeader
from gyrostat.ps.control.settings import PsSettings
from gyrostat.ps.control.status import PsEvent, PsStatus

T = TypeVar("T")


class LedJob:
    """As a context: servers are started at its beginning, and ended at its end."""

    def __init__(self, settings: PsSettings) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe()
        self._selector.register(self._reader, selectors.EVENT_READ, self._work_off)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.leader = PsLeader(settings, self._selector, self)
        self.address, self.token = self.leader.address, self.leader.token
        self._ended = False
        self._thread = threading.Thread(target=self._loop)

    def ps_event(self, event: PsEvent) -> None:
        pass

    def call(self, action: Callable[[], T]) -> T:
        """In the loop's thread."""
        found: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._calls.put(lambda: found.put(action()))
        os.write(self._writer, b"!")
        return found.get()

    def status(self) -> PsStatus:
        return self.leader.status()

    def __enter__(self) -> Self:
        self.leader.begin()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        os.write(self._writer, b"!")
        self._thread.join()
        self.leader.close()
        self._selector.close()
        os.close(self._reader)
        os.close(self._writer)

    def _loop(self) -> None:
        while not self._ended:
            self.leader.tick()
            for key, _ in self._selector.select(max(0.0, self.leader.deadline() - time.monotonic())):
                key.data()

    def _work_off(self) -> None:
        os.read(self._reader, 4096)
        while not self._calls.empty():
            self._calls.get()()
