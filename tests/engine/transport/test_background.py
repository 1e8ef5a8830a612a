"""Background reduction: in order on a thread; on a GPU queued on a side stream, ordered with the stream that computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gyrostat.engine.trace import NoTracer
from gyrostat.engine.transport.background import BackgroundReducer, StreamReducer


class FakeCuda:
    """Records what is queued on which stream."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.current = FakeStream(self, "main")

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, f"side of {device}")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        yield
        self.current = outer

    def run(self, what: str) -> None:
        self.queued.append(f"{self.current.name}: {what}")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.queued.append(f"{self.name}: wait for {other.name}")

    def record_event(self) -> str:
        return f"all of {self.name} up to {len(self.cuda.queued)}"

    def wait_event(self, event: str) -> None:
        self.cuda.queued.append(f"{self.name}: wait for {event}")


def test_a_side_stream_is_ordered_with_the_stream_that_computes() -> None:
    cuda = FakeCuda()
    reducer = StreamReducer(torch.device("cuda:1"), NoTracer(), cuda=cuda)
    cuda.run("backward")
    first = reducer.submit(lambda: cuda.run("reduce bucket 0"), "reduce bucket 0")
    cuda.run("more backward")
    second = reducer.submit(lambda: cuda.run("reduce bucket 1"), "reduce bucket 1")
    first.wait()
    second.wait()
    cuda.run("write .grad")
    assert cuda.queued == [
        "main: backward",
        "side of cuda:1: wait for main",
        "side of cuda:1: reduce bucket 0",
        "main: more backward",
        "side of cuda:1: wait for main",
        "side of cuda:1: reduce bucket 1",
        "main: wait for all of side of cuda:1 up to 3",
        "main: wait for all of side of cuda:1 up to 6",
        "main: write .grad",
    ]


def test_a_thread_runs_work_in_order_and_raises_its_errors_in_the_waiter() -> None:
    reducer, done = BackgroundReducer(NoTracer()), list[int]()
    work_items = [reducer.submit(lambda number=number: done.append(number), "") for number in range(5)]  # type: ignore[misc]
    failing = reducer.submit(lambda: [][0], "")
    for work_item in work_items:
        work_item.wait()
    with pytest.raises(IndexError):
        failing.wait()
    assert done == [0, 1, 2, 3, 4]
