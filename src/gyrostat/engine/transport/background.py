"""Reduces buckets one after the other, while the backward of the last virtual worker still runs.

In host memory a thread does it (`BackgroundReducer`): sums and transfers release Python's lock, and so does backward. On a
GPU the work is queued on a side stream (`StreamReducer`) and needs no thread. A worker has one of them, with one queue: all
workers reduce the same buckets in the same order, so no message waits behind one that its receiver does not expect yet.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from gyrostat.engine.trace import REDUCER, NoTracer

_POLL_S = 0.02


class WorkItem:
    """Work queued on a `BackgroundReducer`."""

    def __init__(
        self, work: Callable[[], object], name: str, check_valid: Callable[[], None] = lambda: None
    ) -> None:
        self._work, self.name, self._check_valid = work, name, check_valid
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised in the thread that waits
            self._error = error
        finally:
            self._work = _nothing  # frees the tensors that it refers to
            self._done.set()

    def wait(self) -> None:
        """Return when the work is done. Raises its error, or that of `check_valid`, which is called meanwhile."""
        while not self._done.wait(_POLL_S):
            self._check_valid()
        if self._error is not None:
            raise self._error


def _nothing() -> None:
    """Replaces work that is done."""


class BackgroundReducer:
    """Runs work items in order, on a daemon thread that starts with the first one."""

    def __init__(self, tracer: NoTracer, check_valid: Callable[[], None] = lambda: None) -> None:
        """`check_valid` raises if the generation has ended."""
        self._tracer, self._check_valid = tracer, check_valid
        self._queue: queue.SimpleQueue[WorkItem | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], object], name: str) -> WorkItem:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gyrostat-reducer", daemon=True)
            self._thread.start()
        work_item = WorkItem(work, name, self._check_valid)
        self._queue.put(work_item)
        return work_item

    def close(self) -> None:
        """End the thread after the work that was submitted."""
        self._queue.put(None)

    def _run(self) -> None:
        while (work_item := self._queue.get()) is not None:
            with self._tracer.span(work_item.name, track=REDUCER):
                work_item.run()


class StreamReducer:
    """Runs work items on a CUDA stream of its own, beside the one that computes.

    The host does not wait for them: a trace shows when they were queued, not how long they took. Not run yet on a GPU.
    """

    def __init__(self, device: torch.device, tracer: NoTracer, *, cuda: Any = torch.cuda) -> None:
        self._device, self._tracer, self._cuda = device, tracer, cuda
        self._stream = cuda.Stream(device)

    def submit(self, work: Callable[[], object], name: str) -> StreamWorkItem:
        """`work` queues operations; they run after what has been queued on the current stream so far."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream), self._tracer.span(f"queue: {name}", track=REDUCER):
            work()
        return StreamWorkItem(self._stream.record_event(), lambda: self._cuda.current_stream(self._device))

    def close(self) -> None:
        """Wait for all queued work."""
        self._stream.synchronize()


class StreamWorkItem:
    """The end of a work item on a stream."""

    def __init__(self, event: Any, current_stream: Callable[[], Any]) -> None:
        self._event, self._current_stream = event, current_stream

    def wait(self) -> None:
        """Let what is queued on the current stream from now on run after it; the host does not wait."""
        self._current_stream().wait_event(self._event)
