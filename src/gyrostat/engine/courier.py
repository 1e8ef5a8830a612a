"""A thread that reduces buckets, one after the other, while the last virtual worker's backward still runs.

Sums and transfers release Python's lock, and so does backward. One thread and one queue: all workers reduce the same buckets
in the same order, so that nobody waits for a message that is behind another one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from gyrostat.engine.trace import COURIER, NoTracer


class Errand:
    """Work handed to a courier."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work, self.name = work, name
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # whatever it is belongs to whoever waits
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        """Until it is done; raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Courier:
    """Does errands in order. Its thread begins with the first one, and never keeps the process alive."""

    def __init__(self, tracer: NoTracer) -> None:
        self._tracer = tracer
        self._errands: queue.SimpleQueue[Errand] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, work: Callable[[], object], name: str) -> Errand:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gyrostat-courier", daemon=True)
            self._thread.start()
        errand = Errand(work, name)
        self._errands.put(errand)
        return errand

    def _run(self) -> None:
        while True:
            errand = self._errands.get()
            with self._tracer.span(errand.name, track=COURIER):
                errand.run()
