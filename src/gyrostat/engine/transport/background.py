"""What reduces buckets, one after the other, while the last virtual worker's backward still runs.

In host memory it is a thread: sums and transfers release Python's lock, and so does backward. On a GPU it is a stream, and no
thread is needed: what is handed over is only queued there. One of them, and one queue: all workers reduce the same buckets in
the same order, so that nobody waits for a message that is behind another one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from gyrostat.engine.trace import COURIER, NoTracer

_LOOK_UP_S = 0.02


class WorkItem:
    """Work handed to a courier."""

    def __init__(
        self, work: Callable[[], object], name: str, look_up: Callable[[], None] = lambda: None
    ) -> None:
        self._work, self.name, self._look_up = work, name, look_up
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # whatever it is belongs to whoever waits
            self._error = error
        finally:
            self._work = _nothing  # what it held is not needed any more
            self._done.set()

    def wait(self) -> None:
        """Until it is done; raises what it raised, or what `look_up` does, which is called now and then."""
        while not self._done.wait(_LOOK_UP_S):
            self._look_up()
        if self._error is not None:
            raise self._error


def _nothing() -> None:
    """Done already."""


class BackgroundReducer:
    """Does errands in order. Its thread begins with the first one, and never keeps the process alive."""

    def __init__(self, tracer: NoTracer, look_up: Callable[[], None] = lambda: None) -> None:
        """`look_up`: raises if nobody should wait any longer."""
        self._tracer, self._look_up = tracer, look_up
        self._errands: queue.SimpleQueue[WorkItem | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, work: Callable[[], object], name: str) -> WorkItem:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gyrostat-courier", daemon=True)
            self._thread.start()
        work_item = WorkItem(work, name, self._look_up)
        self._errands.put(work_item)
        return work_item

    def close(self) -> None:
        """End the thread, when it has done what it was sent for."""
        self._errands.put(None)

    def _run(self) -> None:
        while (work_item := self._errands.get()) is not None:
            with self._tracer.span(work_item.name, track=COURIER):
                work_item.run()


class StreamReducer:
    """Does errands on a stream of a GPU, beside the one that computes.

    The host never waits for them, so a trace shows when they were queued, not how long they took. Written with care,
    but not run: there was no GPU to run it on.
    """

    def __init__(self, device: torch.device, tracer: NoTracer, *, cuda: Any = torch.cuda) -> None:
        self._device, self._tracer, self._cuda = device, tracer, cuda
        self._stream = cuda.Stream(device)

    def send(self, work: Callable[[], object], name: str) -> StreamWorkItem:
        """`work` queues operations, which find what has been queued on the current stream so far."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream), self._tracer.span(f"queue: {name}", track=COURIER):
            work()
        return StreamWorkItem(self._stream.record_event(), lambda: self._cuda.current_stream(self._device))

    def close(self) -> None:
        """When everything has been done."""
        self._stream.synchronize()


class StreamWorkItem:
    """The end of an errand on a stream."""

    def __init__(self, event: Any, current_stream: Callable[[], Any]) -> None:
        self._event, self._current_stream = event, current_stream

    def wait(self) -> None:
        """What is queued on the current stream from now on comes after it."""
        self._current_stream().wait_event(self._event)
